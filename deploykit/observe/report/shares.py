"""Shares of a whole as one bar, whose colors the names below repeat."""

from __future__ import annotations

from collections.abc import Sequence

from deploykit.observe.report.chart import COLORS
from deploykit.observe.report.markup import Markup, text

_WIDTH, _HEIGHT = 640, 26


def bar(parts: Sequence[tuple[str, float]]) -> Markup:
    """The parts side by side, each with its share from 0 to 1, and a legend."""
    x, drawn, named = 0.0, [], []
    for at, (name, share) in enumerate(parts):
        width, title = share * _WIDTH, text(f"{name} {share:.0%}")
        shape = f'<rect class="f{at % COLORS}" x="{x:.1f}" width="{width:.1f}" height="{_HEIGHT}">'
        drawn.append(f"{shape}<title>{title}</title></rect>")
        swatch = f'<rect class="f{at % COLORS}" width="12" height="12"/>'
        icon = f'<svg class="key" viewBox="0 0 12 12" aria-hidden="true">{swatch}</svg>'
        named.append(f"<span>{icon} {title}</span>")
        x += width
    label = text("; ".join(f"{name} {share:.0%}" for name, share in parts))
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"'
        f' preserveAspectRatio="none" class="bar">{"".join(drawn)}</svg>'
        f'<p class="keys">{" ".join(named)}</p>'
    )
