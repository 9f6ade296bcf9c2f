"""Sections of a report about what ranks did: what they used over time, and parts of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from deploykit.observe import charts
from deploykit.observe import html as markup
from deploykit.observe.charts import MOST_POINTS, Chart, Curve
from deploykit.observe.html import Markup
from deploykit.observe.metrics.series import Series
from deploykit.observe.traces import RankProfile
from deploykit.observe.usage import RankUsage, Sample

_STEP, _PART = "step_seconds", "_seconds"
"""Metrics: a whole step, and how the names of its parts end."""
_MINUTE = 60


class _Quantity(NamedTuple):
    title: str
    of: Callable[[RankUsage], float | None]


_QUANTITIES = (
    _Quantity("Memory of each rank, GiB", lambda one: _gib(one.memory)),
    _Quantity("GPU memory of each rank, GiB", lambda one: _gib(one.gpu_memory)),
    _Quantity("GPU of each rank, %", lambda one: one.gpu),
    _Quantity("CPU of each rank, % of a core", lambda one: one.cpu),
)


def usage_charts(samples: Sequence[Sample], restarts: Sequence[float]) -> Iterator[Chart]:
    """What each rank used over time; of many ranks those that used least and most.

    `restarts` are the times at which later attempts began.
    """
    if not samples:
        return
    begin = samples[0].time
    marks = [((time - begin) / _MINUTE, f"restart {at}") for at, time in enumerate(restarts, 1)]
    for title, value_of in _QUANTITIES:
        by_rank: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for time, one in samples:
            value = value_of(one)
            if value is not None:
                by_rank[one.rank].append(((time - begin) / _MINUTE, value))
        chosen = _extremes(by_rank)
        curves = [Curve(f"rank {rank}", charts.thin(by_rank[rank], MOST_POINTS)) for rank in chosen]
        yield Chart(title, "minutes", curves, marks)


def _extremes(by_rank: Mapping[int, Sequence[tuple[float, float]]]) -> list[int]:
    order = sorted(by_rank, key=lambda rank: max(value for _, value in by_rank[rank]))
    half = charts.COLORS // 2
    return sorted(order if len(order) <= charts.COLORS else [*order[:half], *order[-half:]])


def _gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def step(metrics: Mapping[str, Series]) -> Markup:
    """How the time of a step is divided, where the script tells its parts."""
    means = {name: one.curve.mean() for name, one in metrics.items() if name.endswith(_PART)}
    whole = means.pop(_STEP, 0.0)
    parts = {name.removesuffix(_PART): mean for name, mean in means.items()}
    if not whole or not parts or sum(parts.values()) > 1.05 * whole:
        return Markup("")  # they are no parts of it
    listed = [*parts.items(), ("other", max(0.0, whole - sum(parts.values())))]
    rows = [(name, f"{1000 * part:.3g} ms", f"{part / whole:.0%}") for name, part in listed]
    return markup.section(
        "A step",
        markup.paragraph(f"{1000 * whole:.3g} ms on average, of which:", "remark"),
        charts.share_bar([(name, part / whole) for name, part in listed]),
        markup.table(["part", "time", "share"], rows),
    )


def profile(ranks: Sequence[RankProfile]) -> Markup:
    """Who computed and who waited in the profiled steps."""
    rows = [
        (
            f"rank {one.rank}",
            *(
                f"{part / max(one.seconds, 1e-9):.0%}"
                for part in (one.computing, one.communicating, one.waiting, one.idle)
            ),
        )
        for one in ranks
    ]
    heads = ["", "computing", "communicating", "of it waiting", "idle"]
    return markup.section("Profiled steps", markup.table(heads, rows))
