"""Series of points: the last, least and greatest value, and a curve of bounded size."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from deploykit.observe.metrics.outline import Outline
from deploykit.observe.metrics.pace import Pace
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
    curve: Outline = field(default_factory=Outline)
    """Steps, or where no step is known epochs or the number of the point; and values."""

    @property
    def axis(self) -> str:
        """What the curve goes by: ``step``, else ``epoch``, else the number of the ``value``."""
        if self.last.step is not None:
            return "step"
        return "value" if self.last.epoch is None else "epoch"

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
        self.restarts: dict[int, int] = {}
        """The first step of each attempt but the first."""

    def add(self, points: Iterable[Point]) -> None:
        """Add points, of which those of one source come in their order."""
        for _ in self.with_each(points):
            pass

    def with_each(self, points: Iterable[Point]) -> Iterator[Point]:
        """The same points, each of which is added before it is yielded."""
        for point in points:
            key = (point.source, point.name)
            series = self.series.get(key)
            if series is None and len(self.series) < _MOST:
                series = self.series[key] = Series(point.name, point.source, point)
            if series is not None:
                series.add(point)
                self._place(point)
            yield point

    def _place(self, point: Point) -> None:
        """Note when a step came, and where an attempt began."""
        if point.step is None:
            return
        if point.time is not None:
            if point.source not in self.paces:
                self.paces[point.source] = Pace()
            self.paces[point.source].add(point.time, point.step)
        if point.attempt:
            first = self.restarts.get(point.attempt, point.step)
            self.restarts[point.attempt] = min(point.step, first)


def is_chosen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns, in which ``*`` is any text, or there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def without_repeats(points: Iterable[Point]) -> Iterator[Point]:
    """The points without those whose steps a later attempt repeated: every step counts once.

    Series by series, in the order in which these came.
    """
    kept: dict[tuple[str, str], array[float]] = {}
    for point in points:
        key = point.source, point.name
        if key not in kept:
            kept[key] = array("d")
        _keep(kept[key], point)
    for (source, name), numbers in kept.items():
        for at in range(0, len(numbers), _WIDTH):
            step, epoch, time, attempt, value = numbers[at : at + _WIDTH]
            place = _whole(step), _known(epoch), _known(time), _whole(attempt)
            yield Point(name, value, *place, source)


_WIDTH = 5
"""Numbers of a point: as a tuple it would take six times the memory."""


def _keep(numbers: array[float], point: Point) -> None:
    """Add a point after its predecessors, those of its step or a later one excepted."""
    if point.step is not None:
        while numbers and numbers[-_WIDTH] >= point.step:  # false for NaN: that step is not known
            del numbers[-_WIDTH:]
    place = point.step, point.epoch, point.time, point.attempt
    numbers.extend(math.nan if one is None else one for one in place)
    numbers.append(point.value)


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number


def _whole(number: float) -> int | None:
    return None if math.isnan(number) else int(number)
