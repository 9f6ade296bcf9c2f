"""The pipeline bubble, the share of a step in which ranks are idle: predicted and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from trainer.measure.timing import Section, StepTimer
from trainer.seeds import mixed, seed_all


def ideal(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """The bubble's share of a step with equal stages and free communication.

    (p - 1) / (v * m + p - 1) for p ranks, m micro-batches and v stages per rank; v = 1 for GPipe
    and 1F1B. Sources: https://arxiv.org/abs/1811.06965, section 2.3, and
    https://arxiv.org/abs/2104.04473, section 2.2, which gives the bubble as a share of the compute
    time, (p - 1) / (v * m), not of the step.
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


def step_seconds(
    seconds_by_rank: Sequence[float], micro_batches: int, stages_per_rank: int = 1
) -> float:
    """The predicted time of a step, from the seconds that each rank needs per micro-batch.

    The slowest rank computes without a break between the arrival of the first micro-batch and the
    departure of the last one. What precedes and follows takes 1 / `stages_per_rank` of the other
    ranks' time for one micro-batch.
    """
    slowest = max(seconds_by_rank)
    return micro_batches * slowest + (sum(seconds_by_rank) - slowest) / stages_per_rank


def predicted(
    seconds_by_rank: Sequence[float], micro_batches: int, stages_per_rank: int = 1
) -> float:
    """The bubble's predicted share of a step; `ideal` if all ranks take the same time."""
    step = step_seconds(seconds_by_rank, micro_batches, stages_per_rank)
    return 1 - micro_batches * sum(seconds_by_rank) / (len(seconds_by_rank) * step)


class BubbleMeter:
    """Measures the idle share of each rank of a pipeline. All methods are collective.

    The longest step time of all ranks, which is the first rank's, counts as the length of the step.
    The first step is left out: it sets up connections and memory.
    """

    def __init__(self, device: torch.device, group: ProcessGroup) -> None:
        self._device = device
        self._group = group
        self._timer = StepTimer(device)
        self._warm = False
        self._busy_seconds = torch.zeros(group.size(), dtype=torch.float64)
        self._step_seconds = 0.0

    def busy(self) -> Section:
        """Time a block in which this rank computes: ``with meter.busy(): ...``."""
        return self._timer("busy")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step of the pipeline."""
        with self._timer("step"):
            yield
        if not self._warm:
            self._timer.lap()
            self._warm = True

    def latest(self) -> float | None:
        """The mean idle share of the ranks since the last call, or None without a step."""
        sections = self._timer.lap()
        table = torch.zeros(self._group.size(), 2, dtype=torch.float64, device=self._device)
        busy = sections.get("busy", 0.0)  # nested: "step" is without it
        table[self._group.rank()] += torch.tensor(
            [busy, busy + sections.get("step", 0.0)], device=self._device
        )
        distributed.all_reduce(table, group=self._group)
        busy_by_rank, step = table[:, 0].cpu(), float(table[:, 1].max())
        self._busy_seconds += busy_by_rank
        self._step_seconds += step
        return 1 - float(busy_by_rank.mean()) / step if step else None

    def shares(self) -> list[float]:
        """The idle share of each rank since the start; empty without a step."""
        self.latest()
        if not self._step_seconds:
            return []
        shares: list[float] = (1 - self._busy_seconds / self._step_seconds).tolist()
        return shares


class TimedStage(PipelineStage):
    """A pipeline stage that times its compute; communication happens outside of these methods."""

    timer: StepTimer
    bubble: BubbleMeter
    inputs: Sequence[Any] = ()
    """Inputs of the model for each micro-batch, if every stage needs them."""
    seed: int
    """Where stages have the inputs, all draw what follows from this and the micro-batch."""

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *more: Any, **options: Any
    ) -> Any:
        """The forward pass of one micro-batch; not timed in evaluation."""
        if self.inputs:
            kwargs = {"inputs": self.inputs[fwd_chunk_id]}
        run = partial(super().forward_one_chunk, fwd_chunk_id, args, kwargs, *more, **options)
        if not self.has_backward:
            return run()
        if self.inputs:
            seed_all(mixed(self.seed, fwd_chunk_id))
        with self.timer("forward"), self.bubble.busy():
            return run()

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        """The backward pass of one micro-batch; nothing to do in evaluation."""
        if self.has_backward:
            with self.timer("backward"), self.bubble.busy():
                super().backward_one_chunk(*arguments, **options)
