"""An unfinished trial: its runs and their reported values. Imports Optuna."""

from __future__ import annotations

import contextlib
import glob
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_UP, Decimal
from statistics import fmean
from typing import Any, NamedTuple

from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from deploykit.cost.money import Money
from deploykit.diagnose.cause_rules import TRANSIENT
from deploykit.diagnose.ranking import Cause
from deploykit.job.model import State
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import DeploykitError
from deploykit.observe.metrics.points import Point
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run.metrics import RunMetrics
from deploykit.run.registry import Run
from deploykit.sweep import samplers, space
from deploykit.sweep.folder import SweepRecord, run_id
from deploykit.sweep.model import Objective
from deploykit.sweep.space import Values


class Outcome(NamedTuple):
    value: float | None = None
    """Value of the objective; None if there is none."""
    reason: str = ""
    lost: bool = False
    """Whether the machines were at fault, so another attempt may succeed."""
    early: str = ""
    """The line that shows the cause, if the run failed before any step and not by the machines."""


def outcome_of(row: Run, objective: Objective) -> Outcome:
    """Return the outcome of a finished run."""
    if row.state == State.SUCCEEDED.value:
        return _value(row, objective)
    if row.state == State.CANCELLED.value:
        return Outcome(reason=row.reason or "cancelled")
    causes: Sequence[Cause] = ()
    with contextlib.suppress(DeploykitError, OSError):
        causes = run_diagnosis.of_run(row).causes
    rule = causes[0].rule if causes else None  # the most probable
    reason = ": ".join(filter(None, (rule.label if rule else "", row.reason))) or row.state
    if rule is None or rule.retry == TRANSIENT:
        return Outcome(reason=reason, lost=rule is not None)
    return Outcome(reason=reason, early="" if _has_steps(row) else causes[0].evidence[0].text)


def _has_steps(row: Run) -> bool:
    with contextlib.suppress(DeploykitError, OSError):
        return any(True for _ in RunMetrics(row).whole())
    return False


def _value(row: Run, objective: Objective) -> Outcome:
    read = RunMetrics(row)
    points = list(read.whole([glob.escape(objective.metric)]))
    values = [point.value for point in of_objective(points, objective)]
    if not values:
        names = sorted({one.name for one in read.collection.series.values()})
        known = (
            did_you_mean(objective.metric, names)
            or f"metrics of the run: {', '.join(names) or 'none'}"
        )
        return Outcome(reason=f"metric {objective.metric!r} not found; {known}")
    value = values[-1]
    if objective.value == "best":
        best = min if objective.direction == "minimize" else max
        value = best((value for value in values if not math.isnan(value)), default=math.nan)
    if not math.isfinite(value):
        return Outcome(reason=f"{objective.metric} is {value}")
    return Outcome(value)


def of_objective(points: Sequence[Point], objective: Objective) -> list[Point]:
    """Return the objective's points from one source, preferring a file over the log."""
    own = [point for point in points if point.name == objective.metric]
    sources = sorted(
        {point.source for point in own}, key=lambda name: (name.startswith("log"), name)
    )
    return [point for point in own if point.source == sources[0]]


ATTEMPT, STOPPED, SLOT, PRUNED, REASON = "attempt", "stopped", "slot", "pruned", "reason"
RESULTS, COST, CHARGED = "values", "cost", "charged"
"""Attributes of a trial in the journal. The first three end with the number of the repeat."""
_DIGITS = Decimal("1e-9")
_NUMBER = re.compile(r"\d+")


@dataclass
class Live:
    """An unfinished trial. Its whole state is in the journal and the registry."""

    record: SweepRecord
    trial: Trial
    values: Values
    results: dict[int, Outcome] = field(default_factory=dict)
    """Outcomes of its finished runs, by number of the repeat."""
    reader: RunMetrics | None = None

    @property
    def number(self) -> int:
        return self.trial.number

    @property
    def repeats(self) -> range:
        return range(self.record.sweep.repeat)

    @property
    def open(self) -> list[int]:
        """The repeats without a result."""
        return [repeat for repeat in self.repeats if repeat not in self.results]

    def attempt(self, repeat: int) -> int:
        return int(self.trial.user_attrs.get(f"{ATTEMPT} {repeat}", 0))

    def run(self, repeat: int, attempt: int | None = None) -> str:
        """Return the run id of a repeat, by default of its current attempt."""
        chosen = self.attempt(repeat) if attempt is None else attempt
        seed = repeat if self.record.sweep.repeat > 1 else None
        return run_id(self.record.id, self.number, seed, chosen)

    def passed(self, repeat: int) -> space.Passed:
        """What a repeat adds to the job."""
        sweep = self.record.sweep
        result = space.passed(sweep.parameters, self.values)
        if sweep.repeat > 1:
            space.add(result, sweep.repeat_as, str(repeat))
        return result

    def slot(self, repeat: int) -> int | None:
        """The slot of a run; None before it has one. Later attempts keep it."""
        known = self.trial.user_attrs.get(f"{SLOT} {repeat}")
        return known if isinstance(known, int) else None

    def assign_slot(self, repeat: int, slot: int) -> None:
        """Give a run its slot, before it is submitted: the slot is part of its plan."""
        self.trial.set_user_attr(f"{SLOT} {repeat}", slot)

    def retry(self, repeat: int) -> None:
        """Begin another attempt of a repeat, after the last one ended."""
        self.trial.set_user_attr(f"{ATTEMPT} {repeat}", self.attempt(repeat) + 1)
        self.reader = None

    def mark_stopped(self, repeat: int) -> None:
        """Record that the sweep itself is cancelling the current attempt."""
        self.trial.set_user_attr(f"{STOPPED} {repeat}", self.attempt(repeat))

    def is_stopped(self, repeat: int) -> bool:
        """Whether the current attempt was cancelled by `sweep stop`."""
        return self.trial.user_attrs.get(f"{STOPPED} {repeat}") == self.attempt(repeat)

    @property
    def pruned(self) -> bool:
        return PRUNED in self.trial.user_attrs

    def should_stop_early(self, row: Run) -> bool:
        """Report the run's new values to the pruner. Return whether to end the run.

        Values are reported one by one, since a pruner checks only the last one. The values of an
        finished run are reported to the end, because later trials are compared with them.
        """
        objective = self.record.sweep.objective
        if self.reader is None:
            self.reader = RunMetrics(row)
        self.reader.row = row
        for point in of_objective(list(self.reader.new()), objective):
            # as the journal has it, also by an earlier controller
            known = self.trial.storage.get_trial(self.trial._trial_id).last_step  # noqa: SLF001
            last = -1 if known is None else known
            step = last + 1 if point.step is None else point.step
            if step > last:
                self.trial.report(point.value, step)
                if self.trial.should_prune() and not State(row.state).final:
                    self.trial.set_user_attr(PRUNED, step)
                    return True
        return False

    @property
    def early_failure(self) -> tuple[str, str] | None:
        """The line that shows why its runs failed before any step, as it is and without its values.

        None if a run made a step, or failed because of the machines.
        """
        line = next(iter(self.results.values())).early
        if not line or not all(one.early for one in self.results.values()):
            return None
        kind = line
        for value in sorted(self.values.values(), key=len, reverse=True):
            kind = kind.replace(value, "VALUE")
        return line, _NUMBER.sub("0", kind)

    def keep_cost(self, known: Money | None, charged: Decimal) -> None:
        """Record the known cost of its runs, and how much of the cap they have used.

        The runs may be deleted later. Amounts are rounded up.
        """
        self.trial.set_user_attr(CHARGED, str(charged.quantize(_DIGITS, ROUND_UP)))
        if known is not None:
            amount = known.amount.quantize(_DIGITS, ROUND_UP)
            self.trial.set_user_attr(COST, [str(amount), known.currency])

    def tell(self, study: Study) -> str:
        """Record its end in the journal. Return the result as text."""
        failures = [one.reason for one in self.results.values() if one.value is None]
        if self.pruned:
            study.tell(self.number, state=TrialState.PRUNED)
            return f"stopped early at step {self.trial.user_attrs[PRUNED]}"
        if failures:
            self.trial.set_user_attr(REASON, failures[0])
            study.tell(self.number, state=TrialState.FAIL)
            return f"failed: {failures[0]}"
        results = [self.results[repeat].value or 0.0 for repeat in self.repeats]
        if len(results) > 1:
            self.trial.set_user_attr(RESULTS, results)
        study.tell(self.number, fmean(results))
        return f"{self.record.sweep.objective.metric} {fmean(results):.6g}"


def begin(record: SweepRecord, study: Study, number: int) -> Live:
    """Begin a new trial with values from the sampler."""
    study.sampler = samplers.sampler(record.sweep, number)
    point = _retried(record, study, number)
    if point is None:
        point = samplers.point(record.sweep, record.points, number)
    if point is not None and not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        study.enqueue_trial(point)
    trial = study.ask()
    return Live(record, trial, samplers.suggest(record.sweep, trial))


def _retried(record: SweepRecord, study: Study, number: int) -> dict[str, Any] | None:
    """The values of the failed trial that trial `number` tries again; None for any other."""
    place = number - space.trials(record.sweep)
    if place < 0:
        return None
    (failed,) = (
        trial for trial in study.get_trials(deepcopy=False) if trial.number == record.retried[place]
    )
    return dict(failed.params)


def unfinished(record: SweepRecord, study: Study) -> list[Live]:
    """Return the trials that an earlier controller began; some may lack values, chosen here."""
    live = []
    for frozen in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.sampler = samplers.sampler(record.sweep, frozen.number)
        trial = Trial(study, frozen._trial_id)  # noqa: SLF001 - no other way to go on with a trial
        live.append(Live(record, trial, samplers.suggest(record.sweep, trial)))
    return live


def runs(record: SweepRecord, frozen: FrozenTrial) -> Iterator[str]:
    """Yield the run ids of all attempts of a trial."""
    sweep = record.sweep
    for repeat in range(sweep.repeat):
        seed = repeat if sweep.repeat > 1 else None
        for attempt in range(int(frozen.user_attrs.get(f"{ATTEMPT} {repeat}", 0)) + 1):
            yield run_id(record.id, frozen.number, seed, attempt)


def cost(frozen: FrozenTrial) -> Money | None:
    """Return the cost of a finished trial's runs; None if unknown."""
    known = frozen.user_attrs.get(COST)
    return Money(Decimal(known[0]), known[1]) if known else None


def charged(frozen: FrozenTrial) -> Decimal:
    """Return how much of the sweep's cap a finished trial has used."""
    return Decimal(frozen.user_attrs.get(CHARGED, 0))
