"""Parallel coordinates and bars as SVG, for reports of sweeps: no script, colors of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deploykit.observe.report.markup import Markup, text

_WIDTH, _HEIGHT = 1000, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 90, 34, 34
"""Margins around the axes; texts are to the right of an axis."""
_NONE = -0.08
"""The height of a line below an axis on which it has no value."""
_NAME = 18
"""Characters of an axis' name and of a mark."""
_BARS, _BAR, _LABEL, _SHARE = 420, 22, 124, 40
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


class Path(NamedTuple):
    """A line through all axes: its height on each, None where it has no value.

    `kind` is in `KINDS`.
    """

    label: str
    heights: Sequence[float | None]
    kind: str


def draw(axes: Sequence[Axis], lines: Sequence[Path], title: str) -> Markup:
    """The lines over the axes, better kinds above others; nothing without two axes and a line."""
    if len(axes) < 2 or not lines:  # noqa: PLR2004 - one axis has no line
        return Markup("")
    ordered = sorted(lines, key=lambda one: -KINDS.index(one.kind))
    lacking = [any(one.heights[at] is None for one in lines) for at in range(len(axes))]
    parts = [*(_line(one, len(axes)) for one in ordered), *_axes(axes, lacking)]
    size = (_WIDTH, _HEIGHT)
    return _figure(size, parts, title, "min-width:40rem")


def bars(shares: Sequence[tuple[str, float]], title: str) -> Markup:
    """A bar for each name, of a share from 0 to 1; nothing without any."""
    if not shares:
        return Markup("")
    parts = [part for at, one in enumerate(shares) for part in _bar(at, *one)]
    return _figure((_BARS, len(shares) * _BAR), parts, title, "max-width:32rem")


def _figure(size: tuple[int, int], parts: Sequence[str], title: str, width: str) -> Markup:
    return Markup(
        f'<div class="wide" tabindex="0"><svg viewBox="0 0 {size[0]} {size[1]}" role="img"'
        f' aria-label="{text(title)}" style="{width}">{"".join(parts)}</svg></div>'
    )


def _x(at: int, count: int) -> float:
    return _LEFT + at * (_WIDTH - _LEFT - _RIGHT) / (count - 1)


def _y(height: float) -> float:
    return _HEIGHT - _BOTTOM - height * (_HEIGHT - _BOTTOM - _TOP)


def _line(one: Path, count: int) -> str:
    """A line, which passes below an axis on which it has no value."""
    points = (
        f"{_x(at, count):.1f} {_y(_NONE if height is None else height):.1f}"
        for at, height in enumerate(one.heights)
    )
    shape = f'class="line" style="{_STYLES[one.kind]}" d="M{"L".join(points)}"'
    return f"<path {shape}><title>{text(one.label)}</title></path>"


def _axes(axes: Sequence[Axis], lacking: Sequence[bool]) -> Iterator[str]:
    """The axes; `lacking` says on which of them some line has no value."""
    for at, axis in enumerate(axes):
        x = _x(at, len(axes))
        line = f"M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"
        yield f'<path class="grid" style="stroke:var(--ink)" d="{line}"/>'
        name = f'class="mid" style="fill:var(--ink);font-weight:600" x="{x:.1f}" y="{_TOP - 16}"'
        yield f"<text {name}>{_brief(axis.name)}<title>{text(axis.name)}</title></text>"
        none = [(_NONE, "none")] if lacking[at] else []
        for height, mark in (*axis.marks, *none):
            where = f'x="{x + 5:.1f}" y="{_y(height) + 4:.1f}"'
            # the color of the paper around the letters, since lines cross them
            halo = 'style="paint-order:stroke;stroke:var(--paper);stroke-width:3"'
            yield f"<text {where} {halo}>{_brief(mark)}</text>"


def _bar(at: int, name: str, share: float) -> Iterator[str]:
    top, most = at * _BAR, _BARS - _LABEL - _SHARE
    width = max(1.0, min(1.0, share) * most)
    yield f'<text class="end" x="{_LABEL - 8}" y="{top + 15}">{_brief(name)}</text>'
    yield f'<rect class="ran" x="{_LABEL}" y="{top + 3}" width="{width:.1f}" height="{_BAR - 6}"/>'
    yield f'<text x="{_LABEL + width + 6:.1f}" y="{top + 15}">{share:.0%}</text>'


def _brief(name: str) -> Markup:
    return text(name if len(name) <= _NAME else f"{name[: _NAME - 1]}…")
