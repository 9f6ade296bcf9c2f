"""What became of a run of a trial: a value, another attempt, or a failure and its reason."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence
from typing import NamedTuple

from deploykit.job.model import State
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import DeploykitError
from deploykit.observe.metrics.points import Point
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run.metrics import RunMetrics
from deploykit.run.registry import Run
from deploykit.sweep.model import Objective

_LOST = {
    *("slurm_node_boot_failure", "slurm_node_fail", "slurm_preempted", "slurm_controller_busy"),
    *("sagemaker_capacity", "gpu_hardware", "fabric_manager", "port_in_use", "dns_failure"),
    *("net_unreachable", "nccl_init_timeout", "rdzv_timeout", "ib_error"),
}
"""Causes that lie with the machines, so that another attempt may succeed."""


class Outcome(NamedTuple):
    """What became of a run."""

    value: float | None = None
    """Of the objective; None where there is none."""
    reason: str = ""
    """Why there is none."""
    lost: bool = False
    """Whether the machines were the cause, so that another attempt may succeed."""


def of(row: Run, objective: Objective) -> Outcome:
    """The outcome of a run that has ended."""
    if row.state == State.SUCCEEDED.value:
        return _value(row, objective)
    if row.state == State.CANCELLED.value:
        return Outcome(reason=row.reason or "cancelled")
    cause = _cause(row)
    reason = ": ".join(filter(None, (cause, row.reason))) or row.state
    return Outcome(reason=reason, lost=cause in _LOST)


def _cause(row: Run) -> str:
    """The label of the most probable cause; empty where none is known."""
    try:
        causes = run_diagnosis.of_run(row).causes
    except (DeploykitError, OSError):
        return ""
    return causes[0].rule.label if causes else ""


def _value(row: Run, objective: Objective) -> Outcome:
    read = RunMetrics(row)
    points = list(read.whole([glob.escape(objective.metric)]))
    values = [point.value for point in of_objective(points, objective)]
    if not values:
        names = sorted({one.name for one in read.collection.series.values()})
        known = did_you_mean(objective.metric, names) or f"it has {', '.join(names) or 'none'}"
        return Outcome(reason=f"no metric {objective.metric!r} was found; {known}")
    value = _chosen(values, objective)
    if not math.isfinite(value):
        return Outcome(reason=f"{objective.metric} is {value}")
    return Outcome(value)


def of_objective(points: Sequence[Point], objective: Objective) -> list[Point]:
    """The points of the objective, of one source: a file rather than the log."""
    own = [point for point in points if point.name == objective.metric]
    sources = sorted({point.source for point in own}, key=_rank)
    return [point for point in own if point.source == sources[0]]


def _rank(source: str) -> tuple[bool, str]:
    return source.startswith("log"), source


def _chosen(values: Sequence[float], objective: Objective) -> float:
    if objective.value == "last":
        return values[-1]
    best = min if objective.direction == "minimize" else max
    return best((value for value in values if not math.isnan(value)), default=math.nan)
