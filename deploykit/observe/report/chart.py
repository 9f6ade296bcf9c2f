"""Line charts as SVG: no script, so that they print, and follow the colors of the page.

The table below a chart is its legend, and says in text what the lines show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deploykit.observe.report.markup import Markup, text

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
