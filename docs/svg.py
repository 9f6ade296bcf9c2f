"""A small writer of SVG pictures that follow the reader's light or dark theme.

Coordinates are pixels, from the upper left corner. The words of a picture are text, so that they
can be selected, searched and read aloud.
"""

# ruff: noqa: INP001

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Point = tuple[float, float]

STYLE = """
text { font: 13px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #1f2933 }
.title { font-weight: 600 } .small { font-size: 11px; fill: #55606d }
.code { font: 12px ui-monospace, 'SF Mono', 'DejaVu Sans Mono', monospace; white-space: pre }
.prompt { font-weight: 600; fill: #1d4ed8 } .good { fill: #1a7f37 } .bad { fill: #b42318 }
.middle { text-anchor: middle } .end { text-anchor: end } .cell { font-size: 10px }
rect, path, line { stroke: #8a95a3; stroke-width: 1.2 }
path, .frame { fill: none } .frame { stroke-dasharray: 4 4 }
.plain { fill: #f4f6f8 } .blue { fill: #dbeafe; stroke: #3b78c3 }
.green { fill: #d9f2e1; stroke: #2f8f55 } .amber { fill: #fdebc8; stroke: #b97d13 }
.violet { fill: #e9e1fb; stroke: #7a55c7 } .empty { fill: none; stroke: #c3cad2 }
.thin { stroke-width: .9; stroke-opacity: .35 } .head { fill: #8a95a3; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb } .small { fill: #a5b0bd }
  .prompt { fill: #6aa5ea } .good { fill: #58bd82 } .bad { fill: #ff8a80 }
  .plain { fill: #262b33 } .blue { fill: #1d3a5f; stroke: #6aa5ea }
  .green { fill: #173f2a; stroke: #58bd82 } .amber { fill: #4a3510; stroke: #dfa43a }
  .violet { fill: #372a5c; stroke: #a98be8 } .empty { stroke: #4a535f }
}
"""


class Picture:
    """Shapes and words on a transparent ground; `str` of it is the file."""

    def __init__(self, size: Point, title: str) -> None:
        self.size, self._title = size, title
        self._parts: list[str] = []

    def rect(self, at: Point, size: Point, style: str = "plain", *, radius: float = 6) -> None:
        """A rectangle; `style` names its classes."""
        x, y, width, height = map(_number, (*at, *size))
        self._parts.append(
            f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}" '
            f'rx="{_number(radius)}"/>'
        )

    def text(self, at: Point, text: str, style: str = "middle") -> None:
        """One line of text whose baseline begins, or is centered, at `at`."""
        x, y = map(_number, at)
        self._parts.append(f'<text class="{style}" x="{x}" y="{y}">{escape(text)}</text>')

    def colored(self, at: Point, parts: Sequence[tuple[str, str]], style: str) -> None:
        """One line of text in parts, each with its color, or without one that of the style."""
        x, y = map(_number, at)
        spans = "".join(
            f'<tspan style="fill:{color}">{escape(text)}</tspan>' if color else escape(text)
            for text, color in parts
        )
        self._parts.append(f'<text class="{style}" x="{x}" y="{y}">{spans}</text>')

    def box(self, at: Point, size: Point, lines: Sequence[str], style: str = "plain") -> None:
        """A rectangle with a title and smaller lines below it, centered."""
        self.rect(at, size, style)
        middle = at[0] + size[0] / 2
        top = at[1] + size[1] / 2 - 8 * (len(lines) - 1) + 4
        for number, line in enumerate(lines):
            kind = "small" if number else "title"
            self.text((middle, top + 16 * number), line, f"{kind} middle")

    def arrow(self, *points: Point, style: str = "") -> None:
        """A line through the points, with a head at the last one."""
        self.line(*points, style=style)
        (x, y), (fromx, fromy) = points[-1], points[-2]
        length = max(((x - fromx) ** 2 + (y - fromy) ** 2) ** 0.5, 1)
        along = ((x - fromx) / length, (y - fromy) / length)
        corners = [
            (x - 8 * along[0] + side * 4 * along[1], y - 8 * along[1] - side * 4 * along[0])
            for side in (1, -1)
        ]
        self._path([(x, y), *corners], "head", "Z")

    def line(self, *points: Point, style: str = "") -> None:
        """A line through the points."""
        self._path(points, style)

    def slanted(self, at: Point, text: str) -> None:
        """A heading of a column, in code letters, rising to the right."""
        x, y = map(_number, at)
        self._parts.append(
            f'<text class="code" transform="translate({x} {y}) rotate(-60)">{escape(text)}</text>'
        )

    def _path(self, points: Sequence[Point], style: str, end: str = "") -> None:
        steps = "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
        self._parts.append(f'<path class="{style}" d="M{steps}{end}"/>')

    def __str__(self) -> str:
        width, height = map(_number, self.size)
        title = escape(self._title)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
        )
        parts = [head, f"<title>{title}</title>", f"<style>{STYLE}</style>"]
        return "\n".join([*parts, *self._parts, "</svg>\n"])


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
