"""The share of a pipeline's time in which ranks wait: by formula, predicted, and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from trainer.timing import Clock, Part


def ideal(ranks: int, pieces: int, stages_per_rank: int = 1) -> float:
    """(p - 1) / (v * m + p - 1) of a step, with equal stages and sending that takes no time.

    For p ranks, m micro-batches (`pieces`) and v stages on each rank; GPipe and 1F1B have v = 1.
    https://arxiv.org/abs/1811.06965 section 2.3, https://arxiv.org/abs/2104.04473 section 2.2,
    where the bubble is given as a share of the work, (p - 1) / (v * m), not of the step.
    """
    return (ranks - 1) / (stages_per_rank * pieces + ranks - 1)


def step_seconds(ranks: Sequence[float], pieces: int, stages_per_rank: int = 1) -> float:
    """The length of a step whose ranks need so many seconds for each micro-batch.

    The slowest rank works all the time, once the first micro-batch has come to it and until the
    last has gone back from it: 1 / v of the other ranks' time for one micro-batch.
    """
    slowest = max(ranks)
    return pieces * slowest + (sum(ranks) - slowest) / stages_per_rank


def predicted(ranks: Sequence[float], pieces: int, stages_per_rank: int = 1) -> float:
    """The bubble of unequal ranks. Equal ones have `ideal`."""
    whole = len(ranks) * step_seconds(ranks, pieces, stages_per_rank)
    return 1 - pieces * sum(ranks) / whole


class TimedStage(PipelineStage):
    """A stage that knows how long it computes; receiving and sending happen outside of this."""

    clock: Clock
    bubble: Bubble

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        if not self.has_backward:  # evaluation
            return super().forward_one_chunk(*arguments, **options)
        with self.clock("forward"), self.bubble.busy():
            return super().forward_one_chunk(*arguments, **options)

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        if self.has_backward:
            with self.clock("backward"), self.bubble.busy():
                super().backward_one_chunk(*arguments, **options)


class Bubble:
    """Measures the idle share of each rank of a pipeline; every rank calls together.

    A step lasts as long as on the rank where it lasts longest, the first. The very first step is
    left out: in it ranks connect and memory is found.
    """

    def __init__(self, device: torch.device, group: ProcessGroup) -> None:
        self._device = device
        self._group = group
        self._clock = Clock(device)
        self._warm = False
        self._busy, self._whole = torch.zeros(group.size(), dtype=torch.float64), 0.0

    def busy(self) -> Part:
        """``with bubble.busy():`` around what a rank computes."""
        return self._clock("busy")

    @contextmanager
    def step(self) -> Iterator[None]:
        with self._clock("step"):
            yield
        if not self._warm:
            self._clock.lap()
            self._warm = True

    def latest(self) -> float | None:
        """The mean of the ranks' idle shares since the last call; None if there was no step."""
        parts = self._clock.lap()
        every = torch.zeros(self._group.size(), 2, dtype=torch.float64, device=self._device)
        mine = parts.get("busy", 0.0)
        every[self._group.rank()] += torch.tensor(
            [mine, mine + parts.get("step", 0.0)], device=self._device
        )
        distributed.all_reduce(every, group=self._group)
        busy, whole = every[:, 0].cpu(), float(every[:, 1].max())
        self._busy += busy
        self._whole += whole
        return 1 - float(busy.mean()) / whole if whole else None

    def shares(self) -> list[float]:
        """Each rank's idle share so far."""
        self.latest()
        return (1 - self._busy / self._whole).tolist() if self._whole else []
