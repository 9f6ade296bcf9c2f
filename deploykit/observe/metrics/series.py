"""Series of points of bounded size, and how fast a count grows."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from deploykit.observe.metrics.points import Point

_MAX_PARTS = 500
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
        if len(self._parts) > _MAX_PARTS:
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


_RECENT_SHARE = 0.5
"""The share of the time so far over which the pace is taken: it may change."""
_MIN_MARKS = 2
"""Marks that make a difference."""

Marks = Sequence[tuple[float, float]]
"""Times in seconds and the counts reached then; both grow."""


def rate(marks: Marks) -> float | None:
    """The growth in a second, over the last part of the time; None where it is not known."""
    if len(marks) < _MIN_MARKS:
        return None
    end, at = marks[-1]
    since = end - (end - marks[0][0]) * _RECENT_SHARE
    start, was = next((pair for pair in reversed(marks[:-1]) if pair[0] <= since), marks[0])
    return (at - was) / (end - start) if end > start else None


def longest_gap(marks: Marks) -> float:
    """Seconds between two marks at most."""
    return max((after[0] - before[0] for before, after in itertools.pairwise(marks)), default=0.0)


def by_epochs(marks: Marks, end: float, each: float) -> float | None:
    """Seconds from the last mark to the end of an epoch at `end`, of epochs of `each` steps.

    The pace within epochs, and the time that an evaluation or checkpoint takes after each, are
    told apart: at half time one more or one less of these is yet to come. The first step counts
    for neither, as it may compile. None before the first epoch has ended, or with too few marks.
    """
    at = marks[-1][1] if marks else 0.0
    ended = math.ceil(at / each) - 1
    spans = list(itertools.pairwise(marks))[1:]
    within = [span for span in spans if not _ends(span, each)]
    recent = [span for span in within if span[0][0] >= _since(marks)] or within
    steps = sum(after[1] - before[1] for before, after in recent)
    if ended < 1 or not steps:
        return None
    pause = sum(after[0] - before[0] for before, after in recent) / steps
    across = [(span, ends) for span in spans if (ends := _ends(span, each)) and ends[-1] <= ended]
    extra = sum(
        after[0] - before[0] - (after[1] - before[1]) * pause for (before, after), _ in across
    )
    seen = {number for _, ends in across for number in ends}
    boundary = max(0.0, extra / len(seen)) if seen else 0.0
    return (end - at) * pause + (math.ceil(end / each) - ended) * boundary


def _since(marks: Marks) -> float:
    end = marks[-1][0]
    return end - (end - marks[0][0]) * _RECENT_SHARE


def _ends(span: tuple[tuple[float, float], tuple[float, float]], each: float) -> range:
    """The numbers of the epochs whose ends lie between two marks or at one of them."""
    (_, before), (_, after) = span
    return range(max(1, math.ceil(before / each)), math.floor(after / each) + 1)


_MAX_SERIES = 2000
"""Of one run; an untrusted file may hold any number of names."""
_MAX_PAIRS = 1000
"""Of a `Pace`; beyond them every second one goes, and from then on fewer are kept."""


class Pace:
    """How fast a count grows: times and counts of one attempt, evenly thinned if there are many."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pairs: list[Pair] = []
        self._every, self._count = 1, 0
        self._last: Pair = (-math.inf, -math.inf)

    def add(self, time: float, at: float) -> None:
        """Note the count at a time, in seconds. A lower count than before begins anew."""
        if at < self._last[1]:
            self._begin()
        if time <= self._last[0] or at <= self._last[1]:
            return
        self._last = (time, at)
        if self._count % self._every == 0:
            self._pairs.append(self._last)
        self._count += 1
        if len(self._pairs) > _MAX_PAIRS:
            self._pairs = self._pairs[::2]
            self._every *= 2

    def rate(self) -> float | None:
        """The growth per second over the last part of the time, if known."""
        return rate(self.marks())

    def marks(self) -> list[Pair]:
        """Times and counts; the last one is always among them."""
        if not self._pairs or self._pairs[-1] == self._last:
            return self._pairs
        return [*self._pairs, self._last]


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
            if series is None and len(self.series) < _MAX_SERIES:
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
            yield Point(
                name,
                value,
                step=_whole(step),
                epoch=_known(epoch),
                time=_known(time),
                attempt=_whole(attempt),
                source=source,
            )


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
