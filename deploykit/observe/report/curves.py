"""Which charts show the points of runs: loss, learning rate, throughput, memory, time of a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from deploykit.observe.metrics.series import Series
from deploykit.observe.report.chart import COLORS, Chart, Curve, thin

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


class Numbers(NamedTuple):
    """The curve of each metric of one run, and the places of its restarts."""

    run: str
    metrics: Mapping[str, Series]
    restarts: Sequence[tuple[float, str]]
    """By step."""


class _Line(NamedTuple):
    group: str
    axis: str
    curve: Curve


def charts(runs: Sequence[Numbers]) -> list[Chart]:
    """The charts of one run, or of several, whose lines lie over each other metric by metric."""
    by_chart: dict[tuple[str, str], list[Curve]] = {}
    for one in runs:
        for line in _lines(one, several=len(runs) > 1):
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


def _lines(one: Numbers, *, several: bool) -> Iterator[_Line]:
    """The curve of each metric that has two points or more, and its chart."""
    for name, series in one.metrics.items():
        pairs = sorted(series.curve.pairs())
        if len(pairs) > 1:
            group = _group(name)
            alone = several or group in _APART or not group
            chart = f"{group}:{name}" if alone else group
            yield _Line(chart, series.axis, Curve(one.run if several else name, pairs))


def _group(name: str) -> str:
    return next((group for group, names in _GROUPS if names.fullmatch(name)), "")
