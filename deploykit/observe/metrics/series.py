"""Series of points: the last, least and greatest value, and a curve of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from deploykit.observe.metrics.pace import Pace, Thinned
from deploykit.observe.metrics.points import Point

_MOST = 2000
"""Series of one run; an untrusted file may hold any number of names."""


@dataclass
class Series:
    """The points of one name in one source."""

    name: str
    source: str
    last: Point
    count: int = 0
    least: float = math.inf
    greatest: float = -math.inf
    curve: Thinned = field(default_factory=Thinned)
    """Steps, or where no step is known epochs or the number of the point; and values."""

    def add(self, point: Point) -> None:
        """Add a point. One of an earlier step, as after a restart, replaces those from it on."""
        x = _x(point, self.count)
        if self.count and x <= _x(self.last, self.count - 1):
            self.curve.drop_from(x)
        self.curve.add(x, point.value)
        self.last = point
        self.count += 1
        if not math.isnan(point.value):
            self.least, self.greatest = (
                min(self.least, point.value),
                max(self.greatest, point.value),
            )


def _x(point: Point, number: int) -> float:
    if point.step is not None:
        return point.step
    return number if point.epoch is None else point.epoch


class Collection:
    """The series of one run, by source and name, in the order in which they came."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str], Series] = {}
        self.paces: dict[str, Pace] = {}
        """By source: how fast its steps come."""

    def add(self, points: Iterable[Point]) -> None:
        """Add points, of which those of one source come in their order."""
        for point in points:
            key = (point.source, point.name)
            if key not in self.series:
                if len(self.series) >= _MOST:
                    continue
                self.series[key] = Series(point.name, point.source, point)
            self.series[key].add(point)
            if point.step is not None and point.time is not None:
                self.paces.setdefault(point.source, Pace()).add(point.time, point.step)


def is_chosen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns, in which ``*`` is any text, or there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def without_repeats(points: Iterable[Point]) -> list[Point]:
    """The points without those whose steps a later attempt repeated: every step counts once."""
    kept: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        series = kept.setdefault((point.source, point.name), [])
        if point.step is not None:
            while series and series[-1].step is not None and series[-1].step >= point.step:
                series.pop()
        series.append(point)
    return [point for series in kept.values() for point in series]
