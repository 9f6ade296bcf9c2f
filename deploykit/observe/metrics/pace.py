"""Curves of bounded size, and how fast a count grows."""

from __future__ import annotations

import math

from deploykit.observe.metrics import time_left

_LONGEST = 1000
"""Pairs that are kept; then every second one goes, and from then on fewer are taken."""


class Thinned:
    """Some of many pairs, evenly spread over all of them; the last one is always among them."""

    def __init__(self) -> None:
        self._pairs: list[tuple[float, float]] = []
        self._every = 1
        self._count = 0
        self._last: tuple[float, float] | None = None

    def add(self, x: float, y: float) -> None:
        """Add a pair."""
        self._last = (x, y)
        if self._count % self._every == 0:
            self._pairs.append(self._last)
        self._count += 1
        if len(self._pairs) > _LONGEST:
            self._pairs = self._pairs[::2]
            self._every *= 2

    def drop_from(self, x: float) -> None:
        """Forget the pairs whose first number is `x` or more."""
        self._pairs = [pair for pair in self._pairs if pair[0] < x]
        self._last = self._pairs[-1] if self._pairs else None

    def pairs(self) -> list[tuple[float, float]]:
        """The pairs in their order."""
        if self._last is None or (self._pairs and self._pairs[-1] == self._last):
            return self._pairs
        return [*self._pairs, self._last]


class Pace:
    """How fast a count grows: times and counts of one attempt."""

    def __init__(self) -> None:
        self._marks = Thinned()
        self._last: tuple[float, float] = (-math.inf, -math.inf)

    def add(self, time: float, at: float) -> None:
        """Note the count at a time, in seconds. One that is lower than before begins anew."""
        if at < self._last[1]:
            self._marks, self._last = Thinned(), (-math.inf, -math.inf)
        if time > self._last[0] and at > self._last[1]:
            self._marks.add(time, at)
            self._last = (time, at)

    def rate(self) -> float | None:
        """The growth in a second, over the last part of the time; None where it is not known."""
        return time_left.rate(self.marks())

    def marks(self) -> list[tuple[float, float]]:
        """Times and counts, evenly thinned."""
        return self._marks.pairs()
