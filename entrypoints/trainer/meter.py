"""Throughput, time per section of a step, memory, and stragglers."""

from __future__ import annotations

import time

from trainer import comm_timing, flops
from trainer import task as tasks
from trainer.process_group import sum_over_ranks
from trainer.setup import Setup
from trainer.timing import find_straggler


class Meter:
    """Measures the steps between two logged ones."""

    def __init__(self, setup: Setup) -> None:
        self._context = setup.context
        self._timer = setup.timer
        targets = setup.sample.targets
        each = targets[0].numel() if tasks.is_integer(targets) else 1
        self._units = setup.options.batch_size * each
        self._unit = setup.task.unit
        self._flops = 0.0
        if self._context.is_rank_zero:  # counting takes a while, and only rank 0 writes metrics
            self._flops = setup.options.batch_size * self._flops_per_sample(setup)
        self._peak_flops = flops.peak_flops(self._context.device)
        self._step = 0
        self._started = time.perf_counter()

    def _flops_per_sample(self, setup: Setup) -> float:
        try:
            return flops.flops_per_sample(setup.task.model, setup.sample.inputs)
        except Exception as error:  # noqa: BLE001 - models do anything; only the metric is lost
            reason = str(error).partition("\n")[0]
            self._context.log(f"no metrics of floating-point operations: {reason}")
            return 0.0

    def start(self, step: int) -> None:
        """Start measuring after `step` steps; discards the time since the last measurement."""
        self._timer.lap()
        self._step, self._started = step, time.perf_counter()

    def read(self, step: int, loss: float) -> dict[str, float]:
        """The metrics of the steps since the last call. Collective.

        `loss` is this rank's part of the global mean loss; the result has their sum. Times are
        seconds per step on rank 0; memory is in bytes, the maximum over the ranks.
        """
        steps = step - self._step
        sections = {name: each / steps for name, each in self._timer.lap().items()}
        elapsed = (time.perf_counter() - self._started) / steps
        own_seconds = sum(sections.values()) - sections.get(comm_timing.SECTION, 0.0)
        loss, *table = sum_over_ranks(self._context, [loss, *self._row(own_seconds)])
        world_size = self._context.world_size
        own_by_rank, memory_by_rank = table[:world_size], table[world_size:]
        self._warn_of_straggler(step, own_by_rank)
        self.start(step)
        metrics = {
            "loss": loss,
            f"{self._unit}_per_second": self._units / elapsed,
            "step_seconds": elapsed,
            **{f"{name}_seconds": each for name, each in sections.items()},
            "memory_bytes": max(memory_by_rank),
        }
        if self._flops:
            metrics["flops_per_second"] = self._flops / elapsed
        if self._flops and self._peak_flops:
            metrics["mfu"] = self._flops / elapsed / (self._peak_flops * world_size)
        return metrics

    def _row(self, own_seconds: float) -> list[float]:
        """Own seconds and memory in this rank's columns and 0 elsewhere; the sum is a table."""
        seconds, memory = [0.0] * self._context.world_size, [0.0] * self._context.world_size
        seconds[self._context.rank] = own_seconds
        memory[self._context.rank] = flops.peak_memory(self._context.device)
        return seconds + memory

    def _warn_of_straggler(self, step: int, own_by_rank: list[float]) -> None:
        if straggler := find_straggler(own_by_rank):
            rank, ratio = straggler
            self._context.log(
                f"step {step}: rank {rank} is slow: its own work takes "
                f"{own_by_rank[rank] * 1000:.0f} ms per step, {ratio:.1f} times the median; "
                "the other ranks wait for it"
            )
