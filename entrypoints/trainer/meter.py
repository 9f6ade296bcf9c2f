"""The numbers beside the loss: speed, the parts of a step, memory, and a rank that lags."""

from __future__ import annotations

import argparse
import time

from trainer import group, speed, waiting
from trainer.group import Place
from trainer.strategies.single import Single
from trainer.tasks import Task
from trainer.timing import slow_rank


class Meter:
    """Measures between two logged steps; every rank takes part in `read`."""

    def __init__(
        self, options: argparse.Namespace, place: Place, task: Task, strategy: Single
    ) -> None:
        self._place = place
        self._strategy = strategy
        self._samples = options.batch_size
        self._units = options.batch_size * task.training.tensors[1][0].numel()
        self._unit = task.unit
        sample = speed.operations(task.model, task.training) if place.first else 0.0
        self._work = sample * options.batch_size  # counting takes a while, and rank 0 alone tells
        self._peak = speed.peak(place.device)
        self._step = 0
        self._began = time.perf_counter()

    def start(self, step: int) -> None:
        """Begin to measure, after `step` steps: what came before was no training."""
        self._strategy.clock.lap()
        self._step, self._began = step, time.perf_counter()

    def read(self, step: int, loss: float) -> dict[str, float]:
        """The loss of the whole group, given this rank's part, and the numbers since the last call.

        Times are in seconds a step, of rank 0; memory in bytes, of the rank with the most.
        """
        steps = step - self._step
        parts = {name: each / steps for name, each in self._strategy.clock.lap().items()}
        elapsed = (time.perf_counter() - self._began) / steps
        own = sum(parts.values()) - parts.get(waiting.PART, 0.0)
        loss, *table = group.totals(self._place, [loss, *self._row(own)])
        world = self._place.world
        owns, memories = table[:world], table[world:]
        self._warn(step, owns)
        self.start(step)
        return {
            "loss": loss,
            f"{self._unit}_per_second": self._units / elapsed,
            "step_seconds": elapsed,
            **{f"{name}_seconds": each for name, each in parts.items()},
            "memory_bytes": max(memories),
            "flops_per_second": self._work / elapsed,
            **({"mfu": self._work / elapsed / (self._peak * world)} if self._peak else {}),
        }

    def _row(self, own: float) -> list[float]:
        """One number of each kind for each rank, 0 but for this one's: their sum is a table."""
        times, memories = [0.0] * self._place.world, [0.0] * self._place.world
        times[self._place.rank] = own
        memories[self._place.rank] = speed.memory(self._place.device)
        return times + memories

    def _warn(self, step: int, owns: list[float]) -> None:
        if found := slow_rank(owns):
            rank, times = found
            self._place.say(
                f"step {step}: rank {rank} is slow: its own work takes {owns[rank] * 1000:.0f} ms "
                f"a step, {times:.1f} times the median, and the others wait for it"
            )
