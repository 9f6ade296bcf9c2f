"""Charts of reports: which there are, and their coordinates; templates/report draws them as SVG.

The table below a chart is its legend, and says in text what the lines show.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, NamedTuple

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


_CHART = _Box(380, 220, left=16, right=380 - 18, top=18, bottom=220 - 38)
"""Without the labels of the vertical axis, which take as much room as they need."""
_AXES = _Box(1000, 330, left=70, right=1000 - 90, top=34, bottom=330 - 34)
_LETTER_WIDTH = 6.6
"""Of the font, about."""
_TICKS = 5
_DECADES = 1000
"""From this ratio of the greatest to the least value, a scale is logarithmic."""
_MAX_DRAWN = 1e300
"""The difference of greater values may be infinite."""
_FEW = 30
"""Points of a line that are marked."""
_BANDS, _BANDS_BYTES = 60, 200_000
"""Places of a chart with a text for the pointer, and the size of these texts in all charts."""
_COUNTED = {"step", "epoch", "trial", "value"}
"""Axes that have whole numbers only."""
COLORS = 8
"""Lines of a chart that can be told apart; `report.css` has as many colors."""


@dataclass(frozen=True)
class Curve:
    """A line: its name, and its points by x. Values that are not finite are gaps."""

    label: str
    points: Sequence[tuple[float, float]]
    kind: Literal["line", "steps", "dots"] = "line"
    texts: Sequence[str] = ()
    """For the pointer: of each dot."""

    def finite(self) -> list[Pair]:
        """The points that can be drawn."""
        return [point for point in self.points if _is_drawn(point)]

    @property
    def is_drawn(self) -> bool:
        return len(self.finite()) > (self.kind != "dots")  # a point is no line


def _is_drawn(point: Pair) -> bool:
    return all(abs(value) < _MAX_DRAWN for value in point)  # false for NaN, too


@dataclass(frozen=True)
class Chart:
    """Curves over one axis, and marks on it."""

    title: str
    axis: str
    """What x is: steps, epochs."""
    curves: Sequence[Curve]
    marks: Sequence[tuple[float, str]] = ()
    """Places on the axis with their labels, such as restarts."""
    unit: str = ""
    names: Sequence[str] = ()
    """What x = 0, 1, 2 means, if the values on the axis are texts."""
    logarithmic: bool = False
    """Whether the axis is."""

    @property
    def drawn(self) -> Sequence[Curve]:
        return [curve for curve in self.curves if curve.is_drawn][:COLORS]

    @property
    def points(self) -> list[Pair]:
        return [point for curve in self.drawn for point in curve.finite()]


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

    def labels(self, *, whole: bool = False) -> list[tuple[float, str]]:
        """The coordinates of round values within the scale, and the values as text."""
        values = ticks(self.low, self.high, logarithmic=self.logarithmic, whole=whole)
        return [(round(self(value), 1), short(value)) for value in values]


def is_wide(low: float, high: float) -> bool:
    """Whether values from `low` to `high` are better shown on a logarithmic scale."""
    return low > 0 and high / low >= _DECADES


def draw(charts: Iterable[Chart]) -> list[str]:
    """Return the charts as markup, without those that have nothing to draw.

    Those with the same axis share its range, so that places above each other are the same step.
    """
    drawn = [chart for chart in charts if chart.drawn]
    texts = sum(60 + len(curve.label) for chart in drawn for curve in chart.drawn)
    bands = min(_BANDS, _BANDS_BYTES // max(1, texts))
    figures = []
    for number, chart in enumerate(drawn):
        alike = (one for one in drawn if _range_key(one) == _range_key(chart))
        xs = [x for one in alike for x, _ in one.points]
        figures.append(_chart(chart, number, (min(xs), max(xs)), bands))
    return figures


def _range_key(chart: Chart) -> tuple[object, ...]:
    return chart.axis, chart.logarithmic, *chart.names


def _chart(chart: Chart, number: int, reach: Pair, bands: int) -> str:
    values = [y for _, y in chart.points]
    low, high = min(values), max(values)
    wide = is_wide(low, high)
    if low == high:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    up = Scale(low, high, _CHART.bottom - 4, _CHART.top + 4, wide)
    widest = max(len(label) for _, label in up.labels() or [(0, "")])
    box = _CHART._replace(left=_CHART.left + round(_LETTER_WIDTH * widest))
    if chart.names:
        reach = -0.5, len(chart.names) - 0.5
    across = Scale(*reach, box.left, box.right, chart.logarithmic)
    return _drawn(
        "chart",
        number=number,
        chart=chart,
        box=box,
        logarithmic=wide,
        up=up.labels(),
        across=_names(chart.names, across)
        if chart.names
        else across.labels(whole=chart.axis in _COUNTED),
        marks=list(_marks(chart.marks, across)),
        curves=[_curve(curve, across, up) for curve in chart.drawn],
        bands=list(_bands(chart, across, bands)),
    )


def _drawn(macro: str, **values: Any) -> str:
    """Markup of a macro of the template; a `str` that Jinja does not escape again."""
    drawing: str = getattr(render.macros("report/charts.html.j2"), macro)(**values)
    return drawing


def _curve(curve: Curve, across: Scale, up: Scale) -> dict[str, Any]:
    """The path of a curve, broken where a value is not finite; its last, least, greatest value."""
    pieces, pen, places = [], "M", []
    for x, y in curve.points:
        if not _is_drawn((x, y)):
            pen = "M"
            continue
        place = f"{across(x):.1f} {up(y):.1f}"
        places.append(place)
        level = f"H{across(x):.1f}" if curve.kind == "steps" and pen == "L" else ""
        pieces.append(f"{level}{pen}{place}")
        pen = "L"
    values = [y for _, y in curve.finite()]
    return {
        "label": curve.label,
        "kind": curve.kind,
        "path": "".join(pieces),
        # lines without a length, whose round ends are dots
        "markers": "".join(f"M{place}L{place}" for place in places) if len(places) <= _FEW else "",
        "dots": [(*place.split(), text) for place, text in zip(places, curve.texts, strict=False)],
        "numbers": [short(value, 3) for value in (values[-1], min(values), max(values))],
    }


def _bands(chart: Chart, across: Scale, most: int) -> Iterator[dict[str, Any]]:
    """Parts of the area, each with the values there for the pointer; none for dots."""
    lines = [(one.label, sorted(one.finite())) for one in chart.drawn if one.kind == "line"]
    xs = sorted({x for _, points in lines for x, _ in points})
    xs = xs[:: math.ceil(len(xs) / most)] if xs and most else []
    between = (across((one + other) / 2) for one, other in itertools.pairwise(xs))
    edges = itertools.pairwise([across.start, *between, across.end])
    for x, (left, right) in zip(xs, edges, strict=False):
        texts = []
        for label, points in lines:
            _, y = points[max(0, bisect_right(points, (x, math.inf)) - 1)]
            texts.append(f"{label} {short(y)}")
        text = f"{chart.axis} {short(x, 6)}: {', '.join(texts)}"
        yield {"x": round(left, 1), "width": round(max(0.0, right - left), 1), "text": text}


def _names(names: Sequence[str], across: Scale) -> list[tuple[float, str]]:
    """The names on the axis; those that would cover the next one are cut."""
    room = (across.end - across.start) / len(names)
    most = max(2, int(room / _LETTER_WIDTH))
    shown = [name if len(name) <= most else f"{name[: most - 1]}…" for name in names]
    return [(round(across(at), 1), name) for at, name in enumerate(shown)]


def _marks(marks: Sequence[tuple[float, str]], across: Scale) -> Iterator[dict[str, Any]]:
    """The marks within the scale; without `label_x` where a label would cover the one before."""
    free = 0.0
    for x, label in marks:
        if across.low <= x <= across.high:
            half = _LETTER_WIDTH / 2 * len(label)
            middle = min(max(across(x), half), _CHART.width - half)
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


def ticks(
    low: float, high: float, *, logarithmic: bool = False, whole: bool = False
) -> list[float]:
    """About `_TICKS` round values within the range; `whole`: without fractions."""
    if logarithmic:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        if last - first < 2:  # noqa: PLR2004 - too few powers to read values from
            factors = (1, 2, 5) if high / low < 100 else (1, 3)  # noqa: PLR2004 - else they overlap
            values = [f * 10.0**power for power in range(first - 1, last + 1) for f in factors]
            return [value for value in values if low * 0.999 <= value <= high * 1.001]
        every = max(1, math.ceil((last - first + 1) / _TICKS))
        return [10.0**power for power in range(first, last + 1, every)]
    if not high > low or not math.isfinite(high - low):
        return [low]
    raw = (high - low) / _TICKS
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.999)
    step = max(step, 1.0) if whole else step
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
    ("Step time", re.compile(r"(?i).*(?:_seconds|step_time)")),
)
"""What metrics of one run share a chart, by their names; these come first."""
_APART = {"Throughput", "Learning rate"}
"""Groups whose metrics have units of their own."""
_UNITS = {
    "_seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "_bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (1.0, "bytes")),
}
"""The ends of names that say what is measured, and the units for it."""
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
    by_chart: dict[tuple[int, bool, str, str, str], list[Curve]] = {}
    for one in runs:
        for name, series in one.metrics.items():
            pairs = sorted(series.curve.pairs())
            if len(pairs) < 2:  # noqa: PLR2004 - a point is no line
                continue
            group = next((group for group, names in _GROUPS if names.fullmatch(name)), "")
            place = order.index(group) if group else len(order)
            measure = next((end for end in _UNITS if name.endswith(end)), "")
            label = name.removesuffix(measure)
            title = label if several or group in _APART or not group else group
            key = place, series.axis != "step", title, series.axis, measure
            by_chart.setdefault(key, []).append(Curve(one.run if several else label, pairs))
    keys = sorted(by_chart, key=itemgetter(0, 1))[:_MAX_CHARTS]
    count = sum(min(len(by_chart[key]), COLORS) for key in keys)
    most = max(20, min(MAX_POINTS, _CURVES_BYTES // _POINT_BYTES // max(1, count)))
    charts = []
    for key in keys:
        _, is_other_axis, title, axis, measure = key
        thinned = [Curve(one.label, thin(one.points, most)) for one in by_chart[key][:COLORS]]
        curves, unit = _in_unit(thinned, measure)
        marks = () if several or is_other_axis else runs[0].restarts
        if len(curves) == 1 and not several:
            title = curves[0].label
        title = f"{title} by {axis}" if is_other_axis else title
        charts.append(Chart(title, axis, curves, marks, unit))
    return charts


def _in_unit(curves: list[Curve], measure: str) -> tuple[list[Curve], str]:
    """The curves in the largest unit in which the greatest value is 1 or more, and the unit."""
    if not measure:
        return curves, ""
    greatest = max((y for curve in curves for _, y in curve.finite()), default=0.0)
    units = _UNITS[measure]
    size, unit = next((one for one in units if greatest >= one[0]), units[-1])
    return [Curve(one.label, [(x, y / size) for x, y in one.points]) for one in curves], unit


_BELOW = -0.08
"""The height of a line below an axis on which it has no value."""
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
