"""The current state of a sweep: its trials, the best one, and their cost. Imports Optuna."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from optuna.trial import FrozenTrial, TrialState

from deploykit.cost.money import Money, cents
from deploykit.job.model import Notify
from deploykit.lib import shell, units
from deploykit.observe.receivers import Sent
from deploykit.run import notify, registry
from deploykit.run import state as run_state
from deploykit.run.registry import Run
from deploykit.sweep import (
    controller,
    folder,
    samplers,
    trial_job,
    trials,
)
from deploykit.sweep.folder import SweepRecord

_TAIL = 0.975
"""Quantile of Student's t distribution that leaves 2.5% at each end."""


class Spread(NamedTuple):
    """Statistics of one trial's values with different seeds."""

    values: Sequence[float]
    mean: float
    sd: float
    """The standard deviation of the sample, with n - 1."""
    low: float
    """With `high`, the 95% confidence interval of the mean, if the values are about normal."""
    high: float

    def overlaps(self, other: Spread) -> bool:
        """Return whether the intervals overlap, so the difference may be chance."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        count = len(self.values)
        return f"95%: {self.low:.6g} to {self.high:.6g} ({count} runs, sd {self.sd:.3g})"


def spread_of(values: Sequence[float]) -> Spread | None:
    """Return the spread of at least two values; None for fewer."""
    if len(values) < 2:  # noqa: PLR2004 - one value has no deviation
        return None
    from scipy.special import stdtrit  # only repeated trials need it

    mean, sd = fmean(values), stdev(values)
    half = float(stdtrit(len(values) - 1, _TAIL)) * sd / math.sqrt(len(values))
    return Spread(tuple(values), mean, sd, mean - half, mean + half)


_STATES = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "succeeded",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


@dataclass(frozen=True)
class TrialSummary:
    """A trial: its parameters, its result and its runs."""

    number: int
    state: str
    """``running``, ``succeeded``, ``pruned`` or ``failed``."""
    values: Mapping[str, str]
    value: float | None
    """Value of the objective; for a pruned trial, the last reported one."""
    reason: str
    runs: Sequence[Run]
    spread: Spread | None = None
    cost: Money | None = None
    """Cost of its runs so far; None if nothing is billed or known."""

    def data(self) -> dict[str, Any]:
        return {
            "trial": self.number,
            "state": self.state,
            "parameters": dict(self.values),
            "value": self.value,
            "reason": self.reason,
            "spread": self.spread and self.spread._asdict(),
            "cost": _money(self.cost),
            "runs": [{"run": row.run, "state": row.state} for row in self.runs],
        }


@dataclass(frozen=True)
class SweepSummary:
    record: SweepRecord
    trials: Sequence[TrialSummary]
    controlled: bool
    total: int
    """Number of trials of the complete sweep."""
    cost: Money | None
    """Cost of all runs so far; None if nothing is billed or known."""
    capped: bool = False
    halted: str = ""
    """Why it stopped itself; empty if it did not."""

    @property
    def state(self) -> str:
        """``running``, ``stopping``, ``stopped``, ``finished``, ``capped`` or ``interrupted``."""
        going = any(trial.state == "running" for trial in self.trials)
        if self.controlled:
            return "stopping" if self.record.stopping else "running"
        if not going and len(self.trials) >= self.total:
            return "finished"
        if self.record.stopping:
            return "stopped"
        return "capped" if self.capped else "interrupted"

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(trial.state for trial in self.trials))

    @property
    def ranked(self) -> list[TrialSummary]:
        """The successful trials, best first."""
        return self._ranked("succeeded")

    @property
    def pruned(self) -> list[TrialSummary]:
        """The trials stopped early, sorted by their last value, best first."""
        return self._ranked("pruned")

    def _ranked(self, state: str) -> list[TrialSummary]:
        sign = 1 if self.record.sweep.objective.direction == "minimize" else -1
        chosen = [trial for trial in self.trials if trial.state == state]
        return sorted(chosen, key=lambda trial: sign * (trial.value or 0.0))

    @property
    def best(self) -> TrialSummary | None:
        """The trial with the best value; None if no trial has succeeded."""
        return next(iter(self.ranked), None)

    @property
    def not_clearly_worse(self) -> list[int]:
        """Numbers of the trials whose difference from the best may be chance."""
        best = self.best
        if best is None or best.spread is None:
            return []
        return [
            one.number
            for one in self.trials
            if one is not best and one.spread is not None and one.spread.overlaps(best.spread)
        ]

    def data(self) -> dict[str, Any]:
        sweep, best = self.record.sweep, self.best
        return {
            "sweep": self.record.id,
            "state": self.state,
            "reason": self.halted,
            "backend": self.record.backend,
            "metric": sweep.objective.metric,
            "direction": sweep.objective.direction,
            "total": self.total,
            "counts": self.counts,
            "best": best and best.data(),
            "not_clearly_worse": self.not_clearly_worse,
            "cost": _money(self.cost),
            "max_cost": sweep.max_cost,
            "folder": str(self.record.folder),
            "trials": [trial.data() for trial in self.trials],
        }


def _money(cost: Money | None) -> dict[str, Any] | None:
    return cost and {"amount": float(cents(cost.amount)), "currency": cost.currency}


def of(record: SweepRecord) -> SweepSummary:
    """Return the current state of a sweep. Queries the runs of unfinished trials."""
    study = folder.open_study(record)
    known = study.get_trials(deepcopy=False, states=list(_STATES)) if study else []
    ids = {trial.number: list(trials.runs(record, trial)) for trial in known}
    rows = registry.lookup(*(run for several in ids.values() for run in several))
    going = [run for one in known if not one.state.is_finished() for run in ids[one.number]]
    rows |= {row.run: row for row in run_state.refresh([rows[run] for run in going if run in rows])}
    summaries = [
        _trial(record, one, [rows[run] for run in ids[one.number] if run in rows]) for one in known
    ]
    return SweepSummary(
        record,
        summaries,
        record.is_controlled(),
        record.total,
        trial_job.sum_of(one.cost for one in summaries if one.cost is not None),
        bool(study and study.user_attrs.get(controller.CAPPED)),
        str((study and study.user_attrs.get(controller.HALTED)) or ""),
    )


def notify_end(record: SweepRecord, receivers: Notify) -> list[Sent]:
    """Send a message to receivers that want it, if a sweep has ended by itself.

    Each end is sent once: more trials, such as those of `rerun --failed`, have an end of their own.
    """
    sweep = of(record)
    event = "succeeded" if sweep.best else "failed"
    if event not in receivers.events or (sweep.state == "stopped" and not sweep.halted):
        return []
    counts = ", ".join(f"{count} {state}" for state, count in sweep.counts.items())
    facts = [sweep.halted, f"{counts} of {units.plural(sweep.total, 'trial')}"]
    if sweep.best:
        values = ", ".join(f"{name}={value}" for name, value in sweep.best.values.items())
        facts.append(
            f"best {record.sweep.objective.metric} {sweep.best.value:g} "
            f"in trial {sweep.best.number} ({values})"
        )
    message = notify.message(
        event,
        run=record.id,
        state=sweep.state,
        seconds=round(registry.now() - record.created, 1),
        cost=sweep.cost and str(sweep.cost),
        cause="; ".join(filter(None, facts)),
        next=shell.command("deploykit", "sweep", "status", record.id),
    )
    key = f"ended-{sweep.total}-{len(sweep.trials)}"
    return notify.send(record.folder, key, receivers, message)


def _trial(record: SweepRecord, trial: FrozenTrial, rows: Sequence[Run]) -> TrialSummary:
    values = samplers.values(record.sweep, trial.params)
    value = trial.value if trial.state is TrialState.COMPLETE else None
    state, reason = _STATES[trial.state], str(trial.user_attrs.get(trials.REASON, ""))
    if trial.state is TrialState.PRUNED:
        reason = f"stopped early at step {trial.user_attrs.get(trials.PRUNED)}"
        value = trial.intermediate_values.get(trial.last_step or 0)
    interval = spread_of(trial.user_attrs.get(trials.RESULTS, ()))
    cost = trials.cost(trial) if trial.state.is_finished() else trial_job.total(rows)
    return TrialSummary(trial.number, state, values, value, reason, rows, interval, cost)
