"""The time of a run as a bar: how long it waited, and each of its attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deploykit.observe.report.markup import Markup, text

_WIDTH, _HEIGHT = 640, 26
_LEAST = 2.0
"""Width of the shortest part."""


class Part(NamedTuple):
    """A part of the time, in seconds since any moment; `kind` is ``waited`` or ``ran``."""

    begin: float
    end: float
    kind: str
    label: str


def bar(parts: Sequence[Part]) -> Markup:
    """The parts side by side; nothing where they take no time."""
    if not parts or parts[-1].end <= parts[0].begin:
        return Markup("")
    start, size = parts[0].begin, parts[-1].end - parts[0].begin
    drawn = []
    for number, one in enumerate(parts):
        x = (one.begin - start) / size * _WIDTH
        width = max(_LEAST, (one.end - one.begin) / size * _WIDTH)
        kind = f"{one.kind}{' odd' if number % 2 == 0 else ''}"
        shape = f'<rect class="{kind}" x="{x:.1f}" width="{width:.1f}" height="{_HEIGHT}">'
        drawn.append(f"{shape}<title>{text(one.label)}</title></rect>")
    label = text("; ".join(one.label for one in parts))
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"'
        f' preserveAspectRatio="none" class="bar">{"".join(drawn)}</svg>'
    )
