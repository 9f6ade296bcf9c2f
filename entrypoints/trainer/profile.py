"""A trace of chosen steps by torch.profiler, to be opened in a browser (https://ui.perfetto.dev)."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.group import Place

STEPS = re.compile(r"(\d+):(\d+)")
COLLECTIVES = ("gloo:", "nccl:")


class Profile:
    """Traces steps `first` to `last` of every rank into ``trace/rank-N.json``."""

    def __init__(self, steps: str | None, folder: Path, place: Place) -> None:
        found = STEPS.fullmatch(steps or "")
        self._first, self._last = map(int, found.groups()) if found else (0, 0)
        self._folder = folder / "trace"
        self._place = place
        self._running: profile | None = None

    def before(self, step: int) -> None:
        if step == self._first:
            gpu = [ProfilerActivity.CUDA] if self._place.device.type == "cuda" else []
            self._running = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._running.start()

    def after(self, step: int) -> None:
        """Write the trace once the last step is over, and say where its time went."""
        if self._running is None or step < self._last:
            return
        if self._place.device.type == "cuda":
            torch.cuda.synchronize()
        self._running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{self._place.rank}.json"
        self._running.export_chrome_trace(str(path))
        self._place.say(
            f"steps {self._first} to {step} traced in {path}; communication took "
            f"{self._communication() / (step + 1 - self._first) * 1000:.2f} ms a step, "
            "some of it behind computing"
        )
        self._running = None

    def _communication(self) -> float:
        """Seconds inside collectives, on this rank."""
        assert self._running is not None  # noqa: S101 - asked only then
        events = self._running.events() or []
        return sum(
            event.time_range.elapsed_us() / 1e6
            for event in events
            if event.name.startswith(COLLECTIVES)
        )
