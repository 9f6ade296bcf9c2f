"""How far a run is, as text: step, loss, time left, and the loss as a line of blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploykit.lib import units
from deploykit.observe import logfiles
from deploykit.observe.metrics.progress import Progress

_BLOCKS = "▁▂▃▄▅▆▇█"


def line(one: Progress, *, ended: bool = False) -> str:
    """How far a run is, or was at its end, in one line; empty where nothing is known."""
    parts = [*position(one)]
    parts += [f"loss {one.loss:.4g}"] if one.loss is not None else []
    parts += (
        [f"{units.span(one.left)} left"]
        if one.left is not None and not (ended or _is_done(one))
        else []
    )
    return ", ".join(parts)


def line_or_bar(one: Progress, folder: str) -> str:
    """The same; where nothing is known, the bar of rank 0 as it is."""
    return line(one) or logfiles.bar(Path(folder)).strip()


def bar(folder: str) -> str:
    """The bar of rank 0 after its rank, as a log line has it; empty where there is none."""
    state = logfiles.bar(Path(folder)).strip("\n")
    return f"[rank 0] {state}" if state else ""


def position(one: Progress) -> list[str]:
    """``step 120/500`` and ``epoch 2/5``, as far as they are known."""
    pairs = (("step", one.step, one.total), ("epoch", one.epoch, one.epochs))
    return [
        f"{name} {at:.10g}{f'/{end}' if end is not None else ''}"
        for name, at, end in pairs
        if at is not None
    ]


def rate(one: Progress) -> str:
    """``12 steps/s``, or ``1m 5s a step`` where that is slow; empty where it is not known."""
    if not one.rate:
        return ""
    return f"{one.rate:.3g} steps/s" if one.rate >= 1 else f"{1 / one.rate:.3g} s a step"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks, each the mean of its part; ``!`` where one is no number."""
    width = min(width, len(values))
    if not width:
        return ""
    bounds = [len(values) * part // width for part in range(width + 1)]
    means = [_mean(values[start:end]) for start, end in itertools.pairwise(bounds)]
    finite = [mean for mean in means if math.isfinite(mean)]
    least, size = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round((mean - least) / size * top) if size else 0] if math.isfinite(mean) else "!"
        for mean in means
    )


def data(one: Progress) -> dict[str, Any]:
    """The same as JSON; numbers that JSON lacks are texts, as `number` has them."""
    return {
        "step": one.step,
        "total": one.total,
        "epoch": one.epoch,
        "epochs": one.epochs,
        "loss": number(one.loss),
        "steps_per_second": one.rate,
        "throughput": one.throughput
        and {
            "name": one.throughput[0],
            "value": number(one.throughput[1]),
        },
        "seconds_left": one.left if one.left is None else round(one.left, 1),
        "sources": dict(one.sources),
    }


def number(value: float | None) -> float | str | None:
    """A number as JSON has it; ``nan``, ``inf`` and ``-inf`` as texts."""
    return value if value is None or math.isfinite(value) else str(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _is_done(one: Progress) -> bool:
    return one.step is not None and one.step == one.total
