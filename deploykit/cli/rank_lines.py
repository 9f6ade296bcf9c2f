"""What the ranks of a run use, as lines: each of a few, the extremes of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deploykit.lib import units
from deploykit.observe.usage import RankUsage

_EACH = 8
"""Ranks that are shown one by one."""
_GIB = 1 << 30


def lines(ranks: Sequence[RankUsage]) -> Iterator[str]:
    """``rank 0: 98% CPU, 1.2 GiB, GPU 95%, 40.1 of 80.0 GiB``; many ranks in a line for each."""
    if len(ranks) <= _EACH:
        width = len(str(max((one.rank for one in ranks), default=0)))
        for one in ranks:
            yield f"rank {one.rank:>{width}}: {', '.join(_parts(one))}"
        return
    yield f"{len(ranks)} ranks, with the least and the most of each:"
    yield from _extremes("CPU", [(one.cpu, one) for one in ranks], _percent)
    yield from _extremes("memory", [(one.memory, one) for one in ranks], units.memory)
    yield from _extremes("GPU", [(one.gpu, one) for one in ranks], _percent)
    yield from _extremes("GPU memory", [(one.gpu_memory, one) for one in ranks], units.memory)


def data(one: RankUsage) -> dict[str, Any]:
    """The usage of a rank as JSON."""
    return {
        "rank": one.rank,
        "node": one.node,
        "cpu_percent": one.cpu,
        "memory_bytes": one.memory,
        "gpu_percent": one.gpu,
        "gpu_memory_bytes": one.gpu_memory,
        "gpu_size_bytes": one.gpu_size,
    }


def _percent(value: float) -> str:
    return f"{value:.0f}%"


def _parts(one: RankUsage) -> list[str]:
    parts = [] if one.cpu is None else [f"{one.cpu:.0f}% CPU"]
    parts += [] if one.memory is None else [units.memory(one.memory)]
    parts += [] if one.gpu is None else [f"GPU {one.gpu}%"]
    if one.gpu_memory is not None and one.gpu_size is not None:
        parts.append(f"{one.gpu_memory / _GIB:.1f} of {units.memory(one.gpu_size)}")
    return parts or ["not known yet"]


def _extremes(
    name: str, values: Sequence[tuple[float | None, RankUsage]], shown: Callable[[float], str]
) -> Iterator[str]:
    known = sorted((value, one.rank) for value, one in values if value is not None)
    if known:
        (least, first), (most, last) = known[0], known[-1]
        middle = known[len(known) // 2][0]
        ends = f"{shown(least)} (rank {first}) to {shown(most)} (rank {last})"
        yield f"{name} {ends}, median {shown(middle)}"
