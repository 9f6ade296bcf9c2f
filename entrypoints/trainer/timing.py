"""Where the time of a step goes, on each rank, and which rank the others wait for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median
from types import TracebackType
from typing import TypeVar

import torch

Item = TypeVar("Item")

BEHIND = 1.5
"""A rank is called slow when its own work takes so many times the median of all ranks ..."""
NOTICED = 0.005
"""... and at least so many seconds a step more."""


class Clock:
    """Seconds of each part of a step, added up until `lap`. A part inside another counts once.

    On a GPU, whose work goes on while Python is ahead, parts are marked by events on its stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._sums: dict[str, float] = defaultdict(float)
        self._marks: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self.open = ""
        """The part that time now belongs to, if any."""

    def __call__(self, part: str) -> Part:
        """``with clock("forward"):`` counts what it spans under that name."""
        return Part(self, part)

    def timed(self, part: str, items: Iterable[Item]) -> Iterator[Item]:
        """The same items; waiting for each counts as `part`."""
        iterator = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._sums[part] += time.perf_counter() - began
            yield item

    def lap(self) -> dict[str, float]:
        """Seconds of each part since the last call."""
        if self._marks:
            torch.cuda.synchronize()
        for part, around, began, ended in self._marks:
            self._count(part, around, began.elapsed_time(ended) / 1000)
        found = dict(self._sums)
        self._sums.clear()
        self._marks.clear()
        return found

    def mark(self) -> float | torch.cuda.Event:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, part: str, around: str, began: float | torch.cuda.Event) -> None:
        """`part`, begun at that mark inside the part `around`, ends now."""
        ended = self.mark()
        if isinstance(began, float):
            self._count(part, around, ended - began)
        else:
            self._marks.append((part, around, began, ended))

    def _count(self, part: str, around: str, seconds: float) -> None:
        self._sums[part] += seconds
        if around:
            self._sums[around] -= seconds


class Part:
    """A stretch of a step; see `Clock`."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._around, self._clock.open = self._clock.open, self._name
        self._began = self._clock.mark()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clock.add(self._name, self._around, self._began)
        self._clock.open = self._around


def slow_rank(own: list[float]) -> tuple[int, float] | None:
    """The rank that the others wait for, and how many times the median its own work takes.

    `own` holds, for each rank, the seconds a step of work that needs no other rank.
    """
    longest, middle = max(own), median(own)
    if longest < BEHIND * middle or longest - middle < NOTICED:
        return None
    return own.index(longest), longest / middle if middle else float("inf")
