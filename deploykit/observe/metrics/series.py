"""Series of points of bounded size, and how fast a count grows."""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import itemgetter

from deploykit.observe.metrics.points import Point

_MAX_PARTS = 500
"""Parts; then every two become one, and from then on a part holds twice as many pairs."""

Pair = tuple[float, float]


def ends(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with the least and the greatest finite second number, in their order."""
    finite = [pair for pair in pairs if math.isfinite(pair[1])] or pairs[:1]
    return sorted({min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))})


class Outline:
    """Pairs in their order; of many, the least and the greatest of each part, and the last one."""

    def __init__(self) -> None:
        self._parts: list[list[Pair]] = []
        self._open: list[Pair] = []
        """Pairs of the part that is not full yet."""
        self._size = 1
        """Pairs in a part."""
        self._last: list[Pair] = []
        self._count, self._total = 0, 0.0

    def add(self, x: float, y: float) -> None:
        """Add a pair."""
        self._last = [(x, y)]
        self._count, self._total = self._count + 1, self._total + y
        self._open.append((x, y))
        if len(self._open) == self._size:
            self._parts.append(ends(self._open))
            self._open = []
        if len(self._parts) == _MAX_PARTS:
            pairs = zip(self._parts[::2], self._parts[1::2], strict=True)
            self._parts = [ends([*one, *other]) for one, other in pairs]
            self._size *= 2

    def drop_from(self, x: float) -> None:
        """Forget the pairs whose first number is `x` or more."""
        parts = ([pair for pair in part if pair[0] < x] for part in self._parts)
        self._parts = [part for part in parts if part]
        self._open = [pair for pair in self._open if pair[0] < x]
        self._last = []

    def pairs(self) -> list[Pair]:
        """The pairs in their order."""
        parts = [*self._parts, ends(self._open) if self._open else []]
        pairs = [pair for part in parts for pair in part]
        return pairs if pairs[-1:] == self._last else [*pairs, *self._last]

    def mean(self) -> float:
        """The mean of all second numbers that were added; 0 where there are none."""
        return self._total / self._count if self._count else 0.0


Marks = Sequence[tuple[float, float]]
"""Times in seconds and the counts reached then; both grow."""


def rate(marks: Marks) -> float | None:
    """The growth in a second, over the last half of the time; None where it is not known."""
    if len(marks) < 2:  # noqa: PLR2004 - a difference
        return None
    end, at = marks[-1]
    middle = _middle(marks)
    start, was = next((pair for pair in reversed(marks[:-1]) if pair[0] <= middle), marks[0])
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
    recent = [span for span in within if span[0][0] >= _middle(marks)] or within
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


def _middle(marks: Marks) -> float:
    """The middle of the time so far, after which the pace is taken: it may change."""
    return (marks[0][0] + marks[-1][0]) / 2


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
        self._pairs: list[Pair] = []
        self._every, self._count = 1, 0
        self._last: Pair = (-math.inf, -math.inf)

    def add(self, time: float, at: float) -> None:
        """Note the count at a time, in seconds. A lower count than before begins anew."""
        if at < self._last[1]:
            self._pairs, self._every, self._count = [], 1, 0
            self._last = (-math.inf, -math.inf)
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
            self.least = min(self.least, point.value)
            self.greatest = max(self.greatest, point.value)


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
            known = self.series.get(key)
            if _is_lower(point.rank, known.last.rank) if known else len(self.series) < _MAX_SERIES:
                self.series[key] = Series(point.name, point.source, point)
            if key in self.series:
                self.series[key].add(point)
                if point.step is not None:
                    self._place(point, point.step)
            yield point

    def _place(self, point: Point, step: int) -> None:
        """Note when a step came, and where an attempt began."""
        if point.time is not None:
            self.paces.setdefault(point.source, Pace()).add(point.time, step)
        if point.attempt:
            self.restarts[point.attempt] = min(step, self.restarts.get(point.attempt, step))


def is_chosen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns, in which ``*`` is any text, or there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_lower(rank: int | None, other: int | None) -> bool:
    return rank is not None and (other is None or rank < other)


def without_repeats(points: Iterable[Point]) -> Iterator[Point]:
    """The points without those whose steps a later attempt repeated: every step counts once.

    Series by series, in the order in which these came.
    """
    kept: dict[tuple[str, str], Steps] = {}
    ranks: dict[tuple[str, str], int | None] = {}
    for point in points:
        key = (point.source, point.name)
        if _is_lower(point.rank, ranks.setdefault(key, point.rank)):
            kept[key], ranks[key] = Steps(), point.rank
        kept.setdefault(key, Steps()).add(point)
    for (source, name), steps in kept.items():
        for point in steps.points():
            yield point._replace(name=name, source=source)


class Steps:
    """The points of one series without those of steps that were repeated later.

    As numbers, since a log may have millions: as a tuple one would take six times the memory.
    """

    _WIDTH = 5
    """Numbers of a point."""

    def __init__(self) -> None:
        self._numbers = array("d")

    def __len__(self) -> int:
        return len(self._numbers) // self._WIDTH

    def add(self, point: Point) -> None:
        """Add a point. One of an earlier step, as after a restart, replaces those from it on."""
        numbers, step = self._numbers, point.step
        while step is not None and numbers and numbers[-self._WIDTH] >= step:  # false for NaN
            del numbers[-self._WIDTH :]
        place = step, point.epoch, point.time, point.attempt
        numbers.extend(math.nan if one is None else one for one in place)
        numbers.append(point.value)

    def count_to(self, step: int) -> int:
        """How many points have a step of at most `step`, if all have one."""
        return bisect_right(self._numbers[:: self._WIDTH], step)

    def forget(self, count: int) -> None:
        """Drop the first points."""
        del self._numbers[: count * self._WIDTH]

    def points(self, start: int = 0, stop: int | None = None) -> Iterator[Point]:
        """The points from `start` to `stop`, without name and source."""
        for at in range(len(self))[start:stop]:
            *place, value = self._numbers[at * self._WIDTH : (at + 1) * self._WIDTH]
            step, epoch, time, attempt = (None if math.isnan(one) else one for one in place)
            whole_step = None if step is None else int(step)
            whole_attempt = None if attempt is None else int(attempt)
            yield Point("", value, whole_step, epoch, time, whole_attempt)
