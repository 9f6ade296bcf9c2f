"""Time spent in each section of a training step, and detection of stragglers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median
from types import TracebackType
from typing import TypeVar

import torch

Item = TypeVar("Item")

STRAGGLER_RATIO = 1.5
"""A rank is a straggler if its own work takes this many times the median of all ranks ..."""
STRAGGLER_SECONDS = 0.005
"""... and at least this many seconds per step longer."""


class StepTimer:
    """Seconds per section of a step, summed until `lap`. A nested section counts only once.

    On a GPU, which works behind Python, sections are delimited by events on its stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self.current = ""
        """The section that is being timed, or ''."""

    def __call__(self, section: str) -> Section:
        """Time a block: ``with timer("forward"): ...``."""
        return Section(self, section)

    def timed(self, section: str, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over `items`; the time to produce each one counts towards `section`."""
        iterator = iter(items)
        while True:
            started = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._seconds[section] += time.perf_counter() - started
            yield item

    def lap(self) -> dict[str, float]:
        """Seconds of each section since the last call; waits for the GPU."""
        if self._events:
            torch.cuda.synchronize()
        for section, outer, started, ended in self._events:
            self._add(section, outer, started.elapsed_time(ended) / 1000)
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return seconds

    def mark(self) -> float | torch.cuda.Event:
        """The current time: seconds on a CPU, an event on the stream on a GPU."""
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, section: str, outer: str, started: float | torch.cuda.Event) -> None:
        """End `section`, which started at that mark inside the section `outer`."""
        ended = self.mark()
        if isinstance(started, float) and isinstance(ended, float):
            self._add(section, outer, ended - started)
        elif not isinstance(started, float) and not isinstance(ended, float):
            self._events.append((section, outer, started, ended))

    def _add(self, section: str, outer: str, seconds: float) -> None:
        self._seconds[section] += seconds
        if outer:
            self._seconds[outer] -= seconds


class Section:
    """The context manager of one timed section; see `StepTimer`."""

    def __init__(self, timer: StepTimer, name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        self._outer, self._timer.current = self._timer.current, self._name
        self._started = self._timer.mark()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.end(self._name, self._outer, self._started)
        self._timer.current = self._outer


def find_straggler(own_seconds: list[float]) -> tuple[int, float] | None:
    """The slowest rank and its ratio to the median, or None if no rank is clearly slower.

    `own_seconds` holds one value per rank: seconds per step without waiting for other ranks.
    """
    longest, middle = max(own_seconds), median(own_seconds)
    if longest < STRAGGLER_RATIO * middle or longest - middle < STRAGGLER_SECONDS:
        return None
    return own_seconds.index(longest), longest / middle if middle else float("inf")
