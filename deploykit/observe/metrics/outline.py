"""The look of any number of pairs, in little memory."""

from __future__ import annotations

import math

_LONGEST = 500
"""Parts; then every two become one, and from then on a part holds twice as many pairs."""

Pair = tuple[float, float]


class _Part:
    """Pairs that follow each other: the first, the least and the greatest, and their sum."""

    __slots__ = ("count", "first", "greatest", "least", "total")

    def __init__(self, pair: Pair) -> None:
        self.first = self.least = self.greatest = pair
        self.count, self.total = 1, pair[1]

    def take(self, other: _Part) -> None:
        """Add the pairs of the part that follows."""
        self.least = min(self.least, other.least, key=_ascending)
        self.greatest = min(self.greatest, other.greatest, key=_descending)
        self.count += other.count
        self.total += other.total


def _ascending(pair: Pair) -> tuple[bool, float]:
    return not math.isfinite(pair[1]), pair[1]


def _descending(pair: Pair) -> tuple[bool, float]:
    return not math.isfinite(pair[1]), -pair[1]


class Outline:
    """Pairs in their order; of many, the least and the greatest of each part, and the last one."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._most = 1
        """Pairs in a part."""
        self._last: Pair | None = None

    def add(self, x: float, y: float) -> None:
        """Add a pair."""
        self._last = (x, y)
        part = _Part(self._last)
        if self._parts and self._parts[-1].count < self._most:
            self._parts[-1].take(part)
            return
        self._parts.append(part)
        if len(self._parts) > _LONGEST:
            for one, following in zip(self._parts[::2], self._parts[1::2], strict=False):
                one.take(following)
            self._parts = self._parts[::2]
            self._most *= 2

    def drop_from(self, x: float) -> None:
        """Forget the pairs whose first number is `x` or more."""
        self._parts = [part for part in self._parts if part.first[0] < x]
        for part in self._parts[-1:]:
            part.least, part.greatest = (
                pair if pair[0] < x else part.first for pair in (part.least, part.greatest)
            )
        self._last = max(self._pairs(), default=None)

    def pairs(self) -> list[Pair]:
        """The pairs in their order."""
        pairs = self._pairs()
        return pairs if self._last is None or pairs[-1] == self._last else [*pairs, self._last]

    def _pairs(self) -> list[Pair]:
        return [pair for part in self._parts for pair in sorted({part.least, part.greatest})]

    def mean(self) -> float:
        """The mean of all second numbers; 0 where there are none."""
        count = sum(part.count for part in self._parts)
        return math.fsum(part.total for part in self._parts) / count if count else 0.0
