"""Charts of reports as SVG: no script, so that they print, and the colors of the page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deploykit.observe.html import Markup, text
from deploykit.observe.metrics.series import Series

_WIDTH, _HEIGHT = 420, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 34
"""Margins around the plotted area."""
_LETTER = 5
"""Width of a letter of the small font, about."""
_TICKS = 5
_DECADES = 1000
"""From this ratio of the greatest to the least value on, the scale is logarithmic."""
_LARGEST = 1e300
"""Differences of greater values are no number."""
COLORS = 8
"""Lines of a chart that can be told apart; `report.css` has as many colors."""


@dataclass(frozen=True)
class Curve:
    """A line: its name, and its points by x. Values that are no number are gaps."""

    label: str
    points: Sequence[tuple[float, float]]

    def finite(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        return [point for point in self.points if _is_drawn(point)]


def _is_drawn(point: tuple[float, float]) -> bool:
    return all(abs(value) < _LARGEST for value in point)  # not for nan either


@dataclass(frozen=True)
class Chart:
    """Lines over one axis, and marks on it."""

    title: str
    axis: str
    """What x is: steps, epochs."""
    curves: Sequence[Curve]
    marks: Sequence[tuple[float, str]] = ()
    """Places on the axis with their labels, such as restarts."""


class _Scale(NamedTuple):
    """Maps values to a coordinate."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def draw(chart: Chart, number: int) -> Markup:
    """The chart as a figure; `number` differs from those of other charts of the page.

    Nothing where no curve has two points.
    """
    curves = [one for one in chart.curves if len(one.finite()) > 1][:COLORS]
    if not curves:
        return Markup("")
    points = [point for one in curves for point in one.finite()]
    across = _scale([x for x, _ in points], (_LEFT, _WIDTH - _RIGHT))
    up = _scale([y for _, y in points], (_HEIGHT - _BOTTOM, _TOP), may_be_logarithmic=True)
    parts = [
        *_horizontal(up),
        *_vertical(across, chart.axis),
        *_marked(chart.marks, across),
        *(_line(curve, at, across, up) for at, curve in enumerate(curves)),
    ]
    name = f"chart-{number}"
    scale = ", logarithmic scale" if up.logarithmic else ""
    legend = _legend(curves)
    return Markup(
        f'<figure><figcaption id="{name}">{text(chart.title)}{scale}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="{name}">'
        f"{''.join(parts)}</svg>{legend}</figure>"
    )


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most about `most` points with the same look: of each part the least and the greatest."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / max(1, most // 2))
    kept = []
    for start in range(0, len(points), size):
        part = [point for point in points[start : start + size] if math.isfinite(point[1])]
        if part:
            ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
            kept += sorted(ends)
    return [*kept, points[-1]] if kept and kept[-1] != points[-1] else kept


def _scale(
    values: Iterable[float], ends: tuple[float, float], *, may_be_logarithmic: bool = False
) -> _Scale:
    known = list(values)
    low, high = min(known), max(known)
    wide = may_be_logarithmic and low > 0 and high / low >= _DECADES
    if low == high and may_be_logarithmic:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    return _Scale(low, high, *ends, wide)


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


def _horizontal(up: _Scale) -> Iterator[str]:
    """Lines across for the values, each with its number."""
    for value in ticks(up.low, up.high, logarithmic=up.logarithmic):
        y = up(value)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{text(short(value))}</text>'


def _vertical(across: _Scale, axis: str) -> Iterator[str]:
    """The numbers of the axis below, and what they are."""
    for value in ticks(across.low, across.high):
        yield f'<text class="mid" x="{across(value):.1f}" y="{_HEIGHT - 18}">{short(value)}</text>'
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f'<text class="mid" x="{middle:.1f}" y="{_HEIGHT - 3}">{text(axis)}</text>'


def _marked(marks: Sequence[tuple[float, str]], across: _Scale) -> Iterator[str]:
    """Dashed lines up, each with its label where that does not cover the one before."""
    free = 0.0
    for x, label in marks:
        if across.low <= x <= across.high:
            at, half = across(x), _LETTER / 2 * len(label)
            title = f"<title>{text(label)}</title>"
            yield f'<path class="mark" d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}">{title}</path>'
            middle = min(at, _WIDTH - half)
            if middle - half >= free:
                free = middle + half
                anchor = f'x="{middle:.1f}" y="{_TOP - 3}"'
                yield f'<text class="mid small" {anchor}>{text(label)}</text>'


def _line(curve: Curve, at: int, across: _Scale, up: _Scale) -> str:
    """The line of a curve, broken where a value is no number."""
    pieces, pen = [], "M"
    for x, y in curve.points:
        if not _is_drawn((x, y)):
            pen = "M"
            continue
        pieces.append(f"{pen}{across(x):.1f} {up(y):.1f}")
        pen = "L"
    title = f"<title>{text(curve.label)}</title>"
    return f'<path class="line c{at}" d="{"".join(pieces)}">{title}</path>'


def _legend(curves: Sequence[Curve]) -> str:
    """The curves in words: the last value, the least and the greatest."""
    rows = []
    for at, curve in enumerate(curves):
        values = [y for _, y in curve.finite()]
        numbers = (values[-1], min(values), max(values))
        cells = "".join(f"<td>{short(number, 3)}</td>" for number in numbers)
        swatch = f'<svg class="swatch" viewBox="0 0 24 8" aria-hidden="true">{_sample(at)}</svg>'
        rows.append(f'<tr><th scope="row">{swatch}&nbsp;{text(curve.label)}</th>{cells}</tr>')
    names = ("curve", "last", "least", "greatest")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _sample(at: int) -> str:
    return f'<path class="line c{at}" d="M0 4H24"/>'


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
_MOST_CHARTS = 36
_BYTES = 500_000
"""Of all lines together; a point takes `_POINT`."""
_POINT = 14
MOST_POINTS = 400


class RunCurves(NamedTuple):
    """The curve of each metric of one run, and the places of its restarts."""

    run: str
    metrics: Mapping[str, Series]
    restarts: Sequence[tuple[float, str]]
    """By step."""


class _MetricCurve(NamedTuple):
    group: str
    axis: str
    curve: Curve


def charts_of(runs: Sequence[RunCurves]) -> list[Chart]:
    """The charts of one run, or of several, whose lines lie over each other metric by metric."""
    by_chart: dict[tuple[str, str], list[Curve]] = {}
    for one in runs:
        for line in _curves_of(one, several=len(runs) > 1):
            by_chart.setdefault((line.group, line.axis), []).append(line.curve)
    order = {name: position for position, (name, _) in enumerate(_GROUPS)}
    position = lambda key: (order.get(key[0].partition(":")[0], len(order)), key[1] != "step")  # noqa: E731
    keys = sorted(by_chart, key=position)
    chosen = [(key, by_chart[key][:COLORS]) for key in keys][:_MOST_CHARTS]
    count = sum(len(curves) for _, curves in chosen)
    most = max(20, min(MOST_POINTS, _BYTES // _POINT // max(1, count)))
    marks = list(runs[0].restarts) if len(runs) == 1 else []
    return [_chart(key, curves, most, marks) for key, curves in chosen]


def _chart(
    key: tuple[str, str], curves: Iterable[Curve], most: int, marks: list[tuple[float, str]]
) -> Chart:
    group, axis = key
    thinned = [Curve(one.label, thin(one.points, most)) for one in curves]
    title = group.partition(":")[2] or group
    if axis != "step":
        title += f" by {axis}"
    return Chart(title, axis, thinned, marks if axis == "step" else ())


def _curves_of(one: RunCurves, *, several: bool) -> Iterator[_MetricCurve]:
    """The curve of each metric that has two points or more, and its chart."""
    for name, series in one.metrics.items():
        pairs = sorted(series.curve.pairs())
        if len(pairs) > 1:
            group = _group_of(name)
            alone = several or group in _APART or not group
            chart = f"{group}:{name}" if alone else group
            yield _MetricCurve(chart, series.axis, Curve(one.run if several else name, pairs))


def _group_of(name: str) -> str:
    return next((group for group, names in _GROUPS if names.fullmatch(name)), "")


_WIDE, _TALL = 1000, 330
_AXES_LEFT, _AXES_RIGHT, _AXES_TOP, _AXES_BOTTOM = 70, 90, 34, 34
"""Margins around the axes; texts are to the right of an axis."""
_BELOW = -0.08
"""The height of a line below an axis on which it has no value."""
_LONGEST_NAME = 18
"""Characters of an axis' name and of a mark."""
_BARS, _BAR_HEIGHT, _BAR_LABEL, _BAR_SHARE = 420, 22, 124, 40
"""Width of the bars, height of one with its gap, width of its label, and of its number."""
_STYLES = {
    "best": "stroke:var(--c1);stroke-width:3",
    "good": "stroke:var(--c0);stroke-width:1.6;opacity:.8",
    "other": "stroke:var(--dim);stroke-width:1;opacity:.35",
}
KINDS = tuple(_STYLES)
"""Of lines, the best first."""


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


def draw_coordinates(axes: Sequence[Axis], lines: Sequence[Polyline], title: str) -> Markup:
    """The lines over the axes, better kinds above others; nothing without two axes and a line."""
    if len(axes) < 2 or not lines:  # noqa: PLR2004 - one axis has no line
        return Markup("")
    ordered = sorted(lines, key=lambda one: -KINDS.index(one.kind))
    lacking = [any(one.heights[at] is None for one in lines) for at in range(len(axes))]
    parts = [*(_polyline(one, len(axes)) for one in ordered), *_axes(axes, lacking)]
    size = (_WIDE, _TALL)
    return _figure(size, parts, title, "min-width:40rem")


def draw_bars(shares: Sequence[tuple[str, float]], title: str) -> Markup:
    """A bar for each name, of a share from 0 to 1; nothing without any."""
    if not shares:
        return Markup("")
    parts = [part for at, one in enumerate(shares) for part in _bar(at, *one)]
    return _figure((_BARS, len(shares) * _BAR_HEIGHT), parts, title, "max-width:32rem")


def _figure(size: tuple[int, int], parts: Sequence[str], title: str, width: str) -> Markup:
    return Markup(
        f'<div class="wide" tabindex="0"><svg viewBox="0 0 {size[0]} {size[1]}" role="img"'
        f' aria-label="{text(title)}" style="{width}">{"".join(parts)}</svg></div>'
    )


def _x(at: int, count: int) -> float:
    return _AXES_LEFT + at * (_WIDE - _AXES_LEFT - _AXES_RIGHT) / (count - 1)


def _y(height: float) -> float:
    return _TALL - _AXES_BOTTOM - height * (_TALL - _AXES_BOTTOM - _AXES_TOP)


def _polyline(one: Polyline, count: int) -> str:
    """A line, which passes below an axis on which it has no value."""
    points = (
        f"{_x(at, count):.1f} {_y(_BELOW if height is None else height):.1f}"
        for at, height in enumerate(one.heights)
    )
    shape = f'class="line" style="{_STYLES[one.kind]}" d="M{"L".join(points)}"'
    return f"<path {shape}><title>{text(one.label)}</title></path>"


def _axes(axes: Sequence[Axis], lacking: Sequence[bool]) -> Iterator[str]:
    """The axes; `lacking` says on which of them some line has no value."""
    for at, axis in enumerate(axes):
        x = _x(at, len(axes))
        line = f"M{x:.1f} {_AXES_TOP}V{_TALL - _AXES_BOTTOM}"
        yield f'<path class="grid" style="stroke:var(--ink)" d="{line}"/>'
        name = (
            f'class="mid" style="fill:var(--ink);font-weight:600" x="{x:.1f}" y="{_AXES_TOP - 16}"'
        )
        yield f"<text {name}>{_brief(axis.name)}<title>{text(axis.name)}</title></text>"
        none = [(_BELOW, "none")] if lacking[at] else []
        for height, mark in (*axis.marks, *none):
            where = f'x="{x + 5:.1f}" y="{_y(height) + 4:.1f}"'
            # the color of the paper around the letters, since lines cross them
            halo = 'style="paint-order:stroke;stroke:var(--paper);stroke-width:3"'
            yield f"<text {where} {halo}>{_brief(mark)}</text>"


def _bar(at: int, name: str, share: float) -> Iterator[str]:
    top, most = at * _BAR_HEIGHT, _BARS - _BAR_LABEL - _BAR_SHARE
    width = max(1.0, min(1.0, share) * most)
    yield f'<text class="end" x="{_BAR_LABEL - 8}" y="{top + 15}">{_brief(name)}</text>'
    size = f'width="{width:.1f}" height="{_BAR_HEIGHT - 6}"'
    yield f'<rect class="ran" x="{_BAR_LABEL}" y="{top + 3}" {size}/>'
    yield f'<text x="{_BAR_LABEL + width + 6:.1f}" y="{top + 15}">{share:.0%}</text>'


def _brief(name: str) -> Markup:
    return text(name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…")


_STRIP_WIDTH, _STRIP_HEIGHT = 640, 26


def share_bar(parts: Sequence[tuple[str, float]]) -> Markup:
    """The parts side by side, each with its share from 0 to 1, and a legend."""
    x, drawn, named = 0.0, [], []
    for at, (name, share) in enumerate(parts):
        width, title = share * _STRIP_WIDTH, text(f"{name} {share:.0%}")
        size = f'width="{width:.1f}" height="{_STRIP_HEIGHT}"'
        shape = f'<rect class="f{at % COLORS}" x="{x:.1f}" {size}>'
        drawn.append(f"{shape}<title>{title}</title></rect>")
        swatch = f'<rect class="f{at % COLORS}" width="12" height="12"/>'
        icon = f'<svg class="key" viewBox="0 0 12 12" aria-hidden="true">{swatch}</svg>'
        named.append(f"<span>{icon} {title}</span>")
        x += width
    label = text("; ".join(f"{name} {share:.0%}" for name, share in parts))
    return Markup(
        f'<svg viewBox="0 0 {_STRIP_WIDTH} {_STRIP_HEIGHT}" role="img" aria-label="{label}"'
        f' preserveAspectRatio="none" class="bar">{"".join(drawn)}</svg>'
        f'<p class="keys">{" ".join(named)}</p>'
    )


_LEAST = 2.0
"""Width of the shortest part."""


class TimePart(NamedTuple):
    """A part of the time, in seconds since any moment; `kind` is ``waited`` or ``ran``."""

    begin: float
    end: float
    kind: str
    label: str


def time_bar(parts: Sequence[TimePart]) -> Markup:
    """The parts side by side; nothing where they take no time."""
    if not parts or parts[-1].end <= parts[0].begin:
        return Markup("")
    start, size = parts[0].begin, parts[-1].end - parts[0].begin
    drawn = []
    for number, one in enumerate(parts):
        x = (one.begin - start) / size * _STRIP_WIDTH
        width = max(_LEAST, (one.end - one.begin) / size * _STRIP_WIDTH)
        kind = f"{one.kind}{' odd' if number % 2 == 0 else ''}"
        shape = f'<rect class="{kind}" x="{x:.1f}" width="{width:.1f}" height="{_STRIP_HEIGHT}">'
        drawn.append(f"{shape}<title>{text(one.label)}</title></rect>")
    label = text("; ".join(one.label for one in parts))
    return Markup(
        f'<svg viewBox="0 0 {_STRIP_WIDTH} {_STRIP_HEIGHT}" role="img" aria-label="{label}"'
        f' preserveAspectRatio="none" class="bar">{"".join(drawn)}</svg>'
    )
