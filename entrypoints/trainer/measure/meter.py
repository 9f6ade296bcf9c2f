"""Throughput, time per section of a step, memory, and stragglers."""

from __future__ import annotations

import time
from typing import NamedTuple

from trainer import task as tasks
from trainer.measure import comm_timing, flops
from trainer.measure.timing import find_straggler
from trainer.parallel.process_group import sum_over_ranks
from trainer.setup import Setup


class _Measured(NamedTuple):
    """A logged step on this rank: metrics of its own, and the values to sum over the ranks."""

    step: int
    metrics: dict[str, float]
    row: list[float]


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
        self._measured: list[_Measured] = []
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

    def measure(self, step: int, loss: float, **others: float) -> None:
        """Measure the steps since the last call, for `collect`.

        `loss` is this rank's part of the global mean loss, and `others` are further metrics.
        """
        steps = step - self._step
        sections = {name: each / steps for name, each in self._timer.lap().items()}
        elapsed = (time.perf_counter() - self._started) / steps
        own_seconds = sum(sections.values()) - sections.get(comm_timing.SECTION, 0.0)
        metrics = {
            f"{self._unit}_per_second": self._units / elapsed,
            "step_seconds": elapsed,
            **{f"{name}_seconds": each for name, each in sections.items()},
        }
        if self._flops:
            metrics["flops_per_second"] = self._flops / elapsed
        if self._flops and self._peak_flops:
            metrics["mfu"] = self._flops / elapsed / (self._peak_flops * self._context.world_size)
        self._measured.append(_Measured(step, metrics | others, self._row(loss, own_seconds)))
        self.start(step)

    def collect(self) -> list[tuple[int, dict[str, float]]]:
        """The steps measured since the last call, each with its metrics. Collective.

        They are summed over the ranks together, because a collective takes as long as a small step.
        The loss is the sum over the ranks. Times are seconds per step on rank 0; memory is in
        bytes, the maximum over the ranks.
        """
        measured, self._measured = self._measured, []
        if not measured:
            return []
        sums = sum_over_ranks(self._context, [value for each in measured for value in each.row])
        width = len(measured[0].row)
        rows = (sums[start : start + width] for start in range(0, len(sums), width))
        return [
            (each.step, self._merged(each, row)) for each, row in zip(measured, rows, strict=True)
        ]

    def _merged(self, measured: _Measured, row: list[float]) -> dict[str, float]:
        world_size = self._context.world_size
        loss, own_by_rank, memory_by_rank = row[0], row[1 : 1 + world_size], row[1 + world_size :]
        self._warn_of_straggler(measured.step, own_by_rank)
        return {"loss": loss, "memory_bytes": max(memory_by_rank)} | measured.metrics

    def _row(self, loss: float, own_seconds: float) -> list[float]:
        """Loss; own seconds and memory in this rank's columns, 0 elsewhere. `collect` sums them."""
        seconds, memory = [0.0] * self._context.world_size, [0.0] * self._context.world_size
        seconds[self._context.rank] = own_seconds
        memory[self._context.rank] = flops.peak_memory(self._context.device)
        return [loss, *seconds, *memory]

    def _warn_of_straggler(self, step: int, own_by_rank: list[float]) -> None:
        if straggler := find_straggler(own_by_rank):
            rank, ratio = straggler
            self._context.log(
                f"step {step}: rank {rank} is slow: its own work takes "
                f"{own_by_rank[rank] * 1000:.0f} ms per step, {ratio:.1f} times the median; "
                "the other ranks wait for it"
            )
