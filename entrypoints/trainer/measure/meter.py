"""Throughput, time per section of a step, memory, floating-point operations, and stragglers."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from trainer.measure.timing import WAITING
from trainer.parallel.process_group import gather
from trainer.setup import Setup
from trainer.task import call, is_integer

PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
    "T4": 65e12,
    "B200": 2250e12,
}
"""Dense bf16 (V100, T4: fp16) tensor-core operations per second, from NVIDIA's data sheets
(A10G: https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf).
"""
STRAGGLER_RATIO = 1.5
"""A rank is a straggler if its own work takes this many times the median of all ranks ..."""
STRAGGLER_SECONDS = 0.005
"""... and at least this many seconds per step longer."""


class _Measured(NamedTuple):
    """A logged step on this rank: metrics of its own, and the values that all ranks compare."""

    step: int
    metrics: dict[str, float]
    row: list[float]


class Meter:
    """Measures the steps between two logged ones."""

    def __init__(self, setup: Setup) -> None:
        self._context = setup.context
        self._timer = setup.timer
        targets = setup.sample.targets
        each = targets[0].numel() if is_integer(targets) else 1
        self._units = setup.options.batch_size * each
        self._unit = setup.task.unit
        self._flops = 0.0
        if self._context.is_rank_zero:  # counting takes a while, and only rank 0 writes metrics
            self._flops = setup.options.batch_size * self._flops_per_sample(setup)
        self._peak_flops = peak_flops(self._context.device)
        self._measured: list[_Measured] = []
        self._step = 0
        self._started = time.perf_counter()

    def _flops_per_sample(self, setup: Setup) -> float:
        try:
            return flops_per_sample(setup.task.model, setup.sample.inputs)
        except Exception as error:  # noqa: BLE001 - models do anything; only the metric is lost
            reason = str(error).partition("\n")[0]
            self._context.log(f"floating-point operations are not counted: {reason}")
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
        schedule = sections.pop("pipeline", 0.0)
        working = sum(sections.values()) - sections.get(WAITING, 0.0)
        computing = sections.get("forward", 0.0) + sections.get("backward", 0.0)
        metrics = {
            f"{self._unit}_per_second": self._units / elapsed,
            "step_seconds": elapsed,
            **{f"{name}_seconds": each for name, each in sections.items()},
        }
        if self._flops:
            metrics["flops_per_second"] = self._flops / elapsed
        if self._flops and self._peak_flops:
            metrics["mfu"] = self._flops / elapsed / (self._peak_flops * self._context.world_size)
        in_schedule = schedule and schedule + computing + sections.get(WAITING, 0.0)
        row = [loss, computing, working, peak_memory(self._context.device), in_schedule]
        self._measured.append(_Measured(step, metrics | others, row))
        self.start(step)

    def collect(self) -> list[tuple[int, dict[str, float]]]:
        """The steps measured since the last call, each with its metrics. Collective.

        They are gathered together, because a collective takes as long as a small step. The loss is
        the sum over the ranks. Times are seconds per step on rank 0; memory is in bytes, the
        maximum over the ranks. The bubble of a pipeline is the mean share of the longest schedule
        in which ranks do not compute.
        """
        measured, self._measured = self._measured, []
        if not measured:
            return []
        rows = torch.tensor([each.row for each in measured], dtype=torch.float64)
        by_rank = gather(self._context, rows)
        collected = []
        for number, (step, metrics, _) in enumerate(measured):
            losses, computing, working, memory, schedule = by_rank[:, number].T.tolist()
            if straggler := find_straggler(working):
                rank, ratio = straggler
                self._context.log(
                    f"step {step}: rank {rank} is slow: its own work takes "
                    f"{working[rank] * 1000:.0f} ms per step, {ratio:.1f} times the median; "
                    "the other ranks wait for it"
                )
            shared = {"loss": sum(losses), "memory_bytes": max(memory)}
            if max(schedule):
                shared["bubble"] = 1 - fmean(computing) / max(schedule)
            collected.append((step, shared | metrics))
        return collected


def find_straggler(working: list[float]) -> tuple[int, float] | None:
    """The slowest rank and its ratio to the median, or None if no rank is clearly slower.

    `working` holds one value per rank: seconds per step without waiting for other ranks.
    """
    longest, middle = max(working), median(working)
    if longest < STRAGGLER_RATIO * middle or longest - middle < STRAGGLER_SECONDS:
        return None
    return working.index(longest), longest / middle if middle else float("inf")


def flops_per_sample(build: Callable[[], nn.Module], inputs: Any) -> float:
    """Operations of one sample's forward and backward pass; torch counts the forward pass.

    `inputs` is a batch, of which the first sample counts. Raises what the model raises on tensors
    without data, and ValueError if it is not a new one: one in training on several ranks would wait
    for the others.

    The backward pass takes twice as many (https://arxiv.org/abs/2001.08361, section 2.1). The
    second forward pass of activation checkpointing does not count towards MFU.
    """
    sample = pytree.tree_map_only(Tensor, lambda leaf: leaf[:1].to("meta"), inputs)
    with torch.device("meta"):
        model = build()
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("Task.model reused a model, or parts of one, that it had built before")
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(model, sample)
    forward: int = counter.get_total_flops()
    return 3.0 * forward


def peak_flops(device: torch.device) -> float | None:
    """Peak operations per second of one device; None for CPUs and unknown GPUs."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    return next((rate for name, rate in PEAK_FLOPS.items() if name in words), None)


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process so far, in bytes: allocated on the GPU, or resident in RAM."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
