"""Traces of selected steps by torch.profiler, for https://ui.perfetto.dev."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.parallel.process_group import DistributedContext

STEP_RANGE = re.compile(r"(\d+):(\d+)")
"""The option --profile: first and last step."""
COLLECTIVES = ("gloo:", "nccl:")
"""Prefixes of profiler events that are collectives."""


class StepProfiler:
    """Writes a trace of steps FIRST to LAST of every rank to ``trace/rank-N.json`` in `folder`."""

    def __init__(self, steps: str | None, folder: Path, context: DistributedContext) -> None:
        match = STEP_RANGE.fullmatch(steps or "")
        self._first, self._last = map(int, match.groups()) if match else (0, 0)
        self._folder = folder / "trace"
        self._context = context
        self._profile: profile | None = None

    def before_step(self, step: int) -> None:
        """Start the profiler before the first step of the range."""
        if step == self._first:
            gpu = [ProfilerActivity.CUDA] if self._context.device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profile.start()

    def after_step(self, step: int) -> None:
        """After the last step of the range, write the trace and log the communication time."""
        if self._profile is None or step < self._last:
            return
        if self._context.device.type == "cuda":
            torch.cuda.synchronize()
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{self._context.rank}.json"
        self._profile.export_chrome_trace(str(path))
        milliseconds = _communication_seconds(self._profile) / (step + 1 - self._first) * 1000
        self._context.log(
            f"trace of steps {self._first} to {step} written to {path}; communication took "
            f"{milliseconds:.2f} ms per step, some of it overlapped with compute"
        )
        self._profile = None


def _communication_seconds(trace: profile) -> float:
    """Total time of the collectives on this rank."""
    seconds: float = sum(
        event.time_range.elapsed_us() / 1e6
        for event in trace.events() or []
        if event.name.startswith(COLLECTIVES)
    )
    return seconds
