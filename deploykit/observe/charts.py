"""Charts of reports: which there are, and their coordinates; templates/report draws them as SVG.

The table below a chart is its legend, and says in text what the lines show.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from deploykit.lib import render
from deploykit.observe.metrics.series import Pair, Series, ends


class _Box(NamedTuple):
    """The size of a drawing, and the area within its margins."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


_CHART = _Box(420, 240, left=58, right=420 - 12, top=14, bottom=240 - 34)
_AXES = _Box(1000, 330, left=70, right=1000 - 90, top=34, bottom=330 - 34)
_LETTER_WIDTH = 5
"""Of the small font, about."""
_TICKS = 5
_DECADES = 1000
"""From this ratio of the greatest to the least value, a scale is logarithmic."""
_MAX_DRAWN = 1e300
"""The difference of greater values may be infinite."""
COLORS = 8
"""Lines of a chart that can be told apart; `report.css` has as many colors."""


@dataclass(frozen=True)
class Curve:
    """A line: its name, and its points by x. Values that are not finite are gaps."""

    label: str
    points: Sequence[tuple[float, float]]

    def finite(self) -> list[Pair]:
        """The points that can be drawn."""
        return [point for point in self.points if _is_drawn(point)]


def _is_drawn(point: Pair) -> bool:
    return all(abs(value) < _MAX_DRAWN for value in point)  # false for NaN, too


@dataclass(frozen=True)
class Chart:
    """Lines over one axis, and marks on it."""

    title: str
    axis: str
    """What x is: steps, epochs."""
    curves: Sequence[Curve]
    marks: Sequence[tuple[float, str]] = ()
    """Places on the axis with their labels, such as restarts."""


class Scale(NamedTuple):
    """Maps values from `low` to `high` to coordinates from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def labels(self) -> list[tuple[float, str]]:
        """The coordinates of round values within the scale, and the values as text."""
        values = ticks(self.low, self.high, logarithmic=self.logarithmic)
        return [(round(self(value), 1), short(value)) for value in values]


def is_wide(low: float, high: float) -> bool:
    """Whether values from `low` to `high` are better shown on a logarithmic scale."""
    return low > 0 and high / low >= _DECADES


def draw(chart: Chart, number: int) -> str:
    """Return a chart as markup, or nothing if no curve has two points.

    `number` differs from those of other charts of the page.
    """
    curves = [curve for curve in chart.curves if len(curve.finite()) > 1][:COLORS]
    if not curves:
        return ""
    points = [point for curve in curves for point in curve.finite()]
    low, high = min(y for _, y in points), max(y for _, y in points)
    wide = is_wide(low, high)
    if low == high:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    across = Scale(min(points)[0], max(points)[0], _CHART.left, _CHART.right)
    up = Scale(low, high, _CHART.bottom, _CHART.top, wide)
    return _drawn(
        "chart",
        number=number,
        title=chart.title,
        axis=chart.axis,
        box=_CHART,
        logarithmic=wide,
        up=up.labels(),
        across=across.labels(),
        marks=list(_marks(chart.marks, across)),
        curves=[_curve(curve, across, up) for curve in curves],
    )


def _drawn(macro: str, **values: Any) -> str:
    """Markup of a macro of the template; a `str` that Jinja does not escape again."""
    drawing: str = getattr(render.macros("report/charts.html.j2"), macro)(**values)
    return drawing


def _curve(curve: Curve, across: Scale, up: Scale) -> dict[str, Any]:
    """The path of a curve, broken where a value is not finite; its last, least, greatest value."""
    pieces, pen = [], "M"
    for x, y in curve.points:
        if not _is_drawn((x, y)):
            pen = "M"
            continue
        pieces.append(f"{pen}{across(x):.1f} {up(y):.1f}")
        pen = "L"
    values = [y for _, y in curve.finite()]
    numbers = [short(value, 3) for value in (values[-1], min(values), max(values))]
    return {"label": curve.label, "path": "".join(pieces), "numbers": numbers}


def _marks(marks: Sequence[tuple[float, str]], across: Scale) -> Iterator[dict[str, Any]]:
    """The marks within the scale; without `label_x` where a label would cover the one before."""
    free = 0.0
    for x, label in marks:
        if across.low <= x <= across.high:
            half = _LETTER_WIDTH / 2 * len(label)
            middle = min(across(x), _CHART.width - half)
            is_free = middle - half >= free
            free = middle + half if is_free else free
            label_x = round(middle, 1) if is_free else None
            yield {"x": round(across(x), 1), "label": label, "label_x": label_x}


def thin(points: Sequence[Pair], most: int) -> list[Pair]:
    """At most about `most` points with the same look: the least and greatest of each part."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / max(1, most // 2))
    parts = (ends(points[start : start + size]) for start in range(0, len(points), size))
    kept = [point for part in parts for point in part]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def ticks(low: float, high: float, *, logarithmic: bool = False) -> list[float]:
    """About `_TICKS` round values within the range."""
    if logarithmic:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / _TICKS))
        return [10.0**power for power in range(first, last + 1, every)]
    if not high > low or not math.isfinite(high - low):
        return [low]
    raw = (high - low) / _TICKS
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)] if last - first < 100 else [low]  # noqa: PLR2004


_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def short(value: float, digits: int = 4) -> str:
    """A number in few characters: ``12k``, ``0.05``."""
    size = abs(value)
    digits = 4 if size >= 1000 else digits  # noqa: PLR2004 - none as a power of ten
    for unit, suffix in _SUFFIXES:
        if unit <= size < 1e15:  # noqa: PLR2004 - then as a power of ten
            return f"{value / (1e3 if suffix == 'k' else unit):.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


_GROUPS = (
    ("Loss", re.compile(r"(?i)(?:.*[\W_])?\w*loss(?:[\W_].*)?")),
    ("Learning rate", re.compile(r"(?i)(?:.*[\W_])?(?:lr|learning_rate)(?:[\W_].*)?")),
    ("Throughput", re.compile(r"(?i)(?:.*[\W_])?(?:per_sec(?:ond)?|throughput|mfu)|.*\w/s.*")),
    ("Memory", re.compile(r"(?i)(?:.*[\W_])?(?:memory|rss|vram)(?:[\W_].*)?")),
    ("Time of a step", re.compile(r"(?i).*(?:_seconds|step_time)")),
)
"""What metrics of one run share a chart, by their names; these come first."""
_APART = {"Throughput", "Learning rate"}
"""Groups whose metrics have units of their own."""
_MAX_CHARTS = 36
_CURVES_BYTES = 500_000
"""Of all lines together; a point takes `_POINT_BYTES`."""
_POINT_BYTES = 14
MAX_POINTS = 400


class RunCurves(NamedTuple):
    """The curve of each metric of one run, and the places of its restarts."""

    run: str
    metrics: Mapping[str, Series]
    restarts: Sequence[tuple[float, str]]
    """By step."""


def charts_of(runs: Sequence[RunCurves]) -> list[Chart]:
    """The charts of one run, or of several, whose lines lie over each other metric by metric."""
    several = len(runs) > 1
    order = [name for name, _ in _GROUPS]
    by_chart: dict[tuple[int, bool, str, str], list[Curve]] = {}
    for one in runs:
        for name, series in one.metrics.items():
            pairs = sorted(series.curve.pairs())
            if len(pairs) < 2:  # noqa: PLR2004 - a point is no line
                continue
            group = next((group for group, names in _GROUPS if names.fullmatch(name)), "")
            place = order.index(group) if group else len(order)
            title = name if several or group in _APART or not group else group
            key = place, series.axis != "step", title, series.axis
            by_chart.setdefault(key, []).append(Curve(one.run if several else name, pairs))
    keys = sorted(by_chart, key=itemgetter(0, 1))[:_MAX_CHARTS]
    count = sum(min(len(by_chart[key]), COLORS) for key in keys)
    most = max(20, min(MAX_POINTS, _CURVES_BYTES // _POINT_BYTES // max(1, count)))
    charts = []
    for key in keys:
        _, is_other_axis, title, axis = key
        thinned = [Curve(one.label, thin(one.points, most)) for one in by_chart[key][:COLORS]]
        marks = () if several or is_other_axis else runs[0].restarts
        charts.append(Chart(f"{title} by {axis}" if is_other_axis else title, axis, thinned, marks))
    return charts


_BELOW = -0.08
"""The height of a line below an axis on which it has no value."""
_BARS_WIDTH, _BAR_ROW, _BAR_LABEL, _BAR_SHARE = 420, 22, 124, 40
"""Width of all bars, height of one with its gap, width of its label, and of its number."""
KINDS = ("best", "good", "other")
"""Of lines, the best first; `report.css` has a style for each."""


class Axis(NamedTuple):
    """A vertical axis: its name, and its marks by their height from 0, at the bottom, to 1."""

    name: str
    marks: Sequence[tuple[float, str]]


class Polyline(NamedTuple):
    """A line through all axes: its height on each, None where it has no value.

    `kind` is in `KINDS`.
    """

    label: str
    heights: Sequence[float | None]
    kind: str


def draw_coordinates(axes: Sequence[Axis], lines: Sequence[Polyline], title: str) -> str:
    """The lines over the axes, better kinds above others; nothing without two axes and a line.

    A line passes below an axis on which it has no value.
    """
    if len(axes) < 2 or not lines:  # noqa: PLR2004 - one axis has no line
        return ""
    xs = [_AXES.left + at * (_AXES.right - _AXES.left) / (len(axes) - 1) for at in range(len(axes))]
    up = Scale(0.0, 1.0, _AXES.bottom, _AXES.top)
    drawn_axes = []
    for at, (x, axis) in enumerate(zip(xs, axes, strict=True)):
        has_gap = any(line.heights[at] is None for line in lines)
        marks = [*axis.marks, *([(_BELOW, "none")] if has_gap else [])]
        labels = [(round(up(height), 1), mark) for height, mark in marks]
        drawn_axes.append({"x": round(x, 1), "name": axis.name, "marks": labels})
    drawn_lines = []
    for line in sorted(lines, key=lambda line: -KINDS.index(line.kind)):
        heights = (_BELOW if height is None else height for height in line.heights)
        points = (f"{x:.1f} {up(height):.1f}" for x, height in zip(xs, heights, strict=True))
        path = f"M{'L'.join(points)}"
        drawn_lines.append({"label": line.label, "path": path, "kind": f"{line.kind}-trial"})
    return _drawn("coordinates", title=title, box=_AXES, axes=drawn_axes, lines=drawn_lines)


def draw_bars(shares: Sequence[tuple[str, float]], title: str) -> str:
    """A bar for each name, of a share from 0 to 1; nothing without any."""
    if not shares:
        return ""
    most = _BARS_WIDTH - _BAR_LABEL - _BAR_SHARE
    rows = [
        (name, round(max(1.0, min(1.0, share) * most), 1), f"{share:.0%}") for name, share in shares
    ]
    box = {"width": _BARS_WIDTH, "row": _BAR_ROW, "left": _BAR_LABEL}
    return _drawn("bars", title=title, box=box, rows=rows)


_STRIP_WIDTH = 640
_LEAST_WIDTH = 2.0
"""Width of the shortest part of a run's time."""


def share_bar(parts: Sequence[tuple[str, float]]) -> str:
    """The parts of a whole side by side, each with its share from 0 to 1, and a legend."""
    x, drawn = 0.0, []
    for at, (name, share) in enumerate(parts):
        width = share * _STRIP_WIDTH
        drawn.append(_strip_part(f"f{at % COLORS}", x, width, f"{name} {share:.0%}"))
        x += width
    return _drawn("strip", parts=drawn, keys=True)


class TimePart(NamedTuple):
    """A part of the time, in seconds since any moment; `kind` is ``waited`` or ``ran``."""

    begin: float
    end: float
    kind: str
    label: str


def time_bar(parts: Sequence[TimePart]) -> str:
    """The parts of a run's time side by side; nothing if they take no time."""
    if not parts or parts[-1].end <= parts[0].begin:
        return ""
    across = Scale(parts[0].begin, parts[-1].end, 0.0, _STRIP_WIDTH)
    drawn = []
    for number, part in enumerate(parts):
        kind = f"{part.kind}{' odd' if number % 2 == 0 else ''}"
        width = max(_LEAST_WIDTH, across(part.end) - across(part.begin))
        drawn.append(_strip_part(kind, across(part.begin), width, part.label))
    return _drawn("strip", parts=drawn)


def _strip_part(kind: str, x: float, width: float, label: str) -> dict[str, Any]:
    return {"kind": kind, "x": round(x, 1), "width": round(width, 1), "label": label}
