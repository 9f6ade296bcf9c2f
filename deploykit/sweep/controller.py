"""The controller of a sweep: start trials, monitor their runs, and record the results.

It may be killed at any time. A trial is in the journal before its run is submitted, and the run id
consists of the sweep's id and the trial's number, so the next controller either finds the run or
submits it for the first time.

If trials are independent of each other and the backend has job arrays, all trials that the budget
allows are submitted together, and the backend limits the number of runs at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from optuna.study import Study
from optuna.trial import TrialState

from deploykit.backends import base as backend
from deploykit.job.model import Handle, State
from deploykit.lib.errors import DeploykitError, Uncertain
from deploykit.run import lifecycle, registry
from deploykit.run import state as run_state
from deploykit.run.registry import Run
from deploykit.sweep import samplers, space, trial_job, trials
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.trial_job import Base, Budget
from deploykit.sweep.trials import Live

_POLL = (0.1, 5.0)
"""Shortest and longest interval between two queries of the runs, in seconds."""
_PRUNING = 0.2
"""The longest interval if a query is cheap and a pruner may end a run early."""
_IDLE = 10
"""Minimum ratio of sleep to CPU time, because the controller shares its machine."""
CAPPED = "capped"
"""Attribute of the study: whether the sweep ended because of its cap."""
HALTED = "halted"
"""Attribute of the study: why the sweep stopped itself."""
ALIKE = 3
"""First trials that fail alike before any step, after which the others would, too."""
Tell = Callable[[str], None]


@dataclass
class Controller:
    """One process that controls a sweep; it holds the sweep's lock."""

    record: SweepRecord
    study: Study
    base: Base
    tell: Tell
    """Called with one line per event."""
    budget: Budget = field(default_factory=Budget)
    live: list[Live] = field(default_factory=list)
    slots: Sequence[Mapping[str, str]] = ()
    """Variables of each slot; empty if all slots are the same."""
    _ended: Decimal = Decimal(0)
    """Cost of the runs of finished trials."""
    _number: int = 0
    """Number of the next trial."""
    _last: int = 0
    _array: int = 0
    """Maximum number of runs in one job array; 0: each run is submitted alone."""
    _running: list[Handle] = field(default_factory=list)
    """Jobs that were unfinished at the last query."""
    _changed: bool = False
    _early: list[str] | None = field(default_factory=list)
    """How each trial failed before any step; None once one did not."""
    _said: str = ""

    def run(self) -> None:
        """Run until all trials have ended, the cap is reached, or `sweep stop` is called.

        Raises what `lifecycle.submit` raises, if there is no other run to wait for.
        """
        self.study.set_user_attr(CAPPED, False)
        self.study.set_user_attr(HALTED, "")
        self._recover()
        pause, longest = _POLL[0], self._longest
        began = time.process_time()
        while self.step():
            pause = _POLL[0] if self._changed else min(pause * 1.2, longest)
            if self._array:  # no slot waits for this process
                pause = max(pause, min(_IDLE * (time.process_time() - began), longest))
            self._sleep(pause)
            began = time.process_time()
        if not self.live and (self._number >= self._last or not self.record.stopping):
            self.record.finish()

    @property
    def _longest(self) -> float:
        """The longest interval between two queries of the runs, in seconds."""
        cheap = backend.offers(backend.find(self.base.backend), "await_end")
        return _PRUNING if cheap and self._prunes else _POLL[1]

    def _sleep(self, seconds: float) -> None:
        """Sleep until a run may have ended, but at most `seconds`."""
        engine = backend.find(self.base.backend)
        if not backend.offers(engine, "await_end"):
            time.sleep(seconds)
            return
        time.sleep(_POLL[0])
        engine.await_end(self._running, seconds - _POLL[0])

    def _recover(self) -> None:
        """Resume the state that earlier controllers left."""
        self.budget = trial_job.budget(self.record.sweep, self.base)
        self.slots = trial_job.slots(self.base)
        if samplers.is_pointwise(self.record.sweep) and not self._prunes:
            self._array = trial_job.largest_array(self.base)  # no trial depends on others
        self._last = self.record.total
        begun = [state for state in TrialState if state is not TrialState.WAITING]
        known = self.study.get_trials(deepcopy=False, states=begun)
        self._number = len(known)
        self.live = trials.unfinished(self.record, self.study)
        over = [trial for trial in known if trial.state is not TrialState.RUNNING]
        self._ended = sum(map(trials.charged, over), Decimal(0))
        if any(trial.state is not TrialState.FAIL for trial in over):
            self._early = None

    def step(self) -> bool:
        """Query all runs once, and act on it. Return whether anything is left to do."""
        self._changed = False
        if self.record.stopping:
            return self._stop()
        rows = self._rows()
        for live in list(self.live):
            self._follow(live, rows)
        if self.record.stopping:
            return self._stop()
        self._begin()
        self._submit_all(rows)
        return bool(self.live)

    def _rows(self) -> dict[str, Run]:
        """Return the current rows of all unfinished runs, with one query to the backend."""
        ids = [live.run(repeat) for live in self.live for repeat in live.open]
        rows = run_state.refresh(list(registry.lookup(*ids).values()))
        self._running = [row.handle for row in rows if row.handle and not _is_over(row)]
        return {row.run: row for row in rows}

    def _follow(self, live: Live, rows: dict[str, Run]) -> None:
        """Record the outcomes of a trial's runs, and finish the trial after the last."""
        for repeat in live.open:
            row = rows.get(live.run(repeat))
            if row is not None and _is_over(row):
                self._settle(live, repeat, row)
            elif row is not None and row.state == State.RUNNING.value:
                self._prune(live, row)
        if not live.open:
            self.live.remove(live)
            self._finish(live)

    def _settle(self, live: Live, repeat: int, row: Run) -> None:
        """Keep the outcome of a finished run, or begin another attempt."""
        self._changed = True
        if self._prunes and not live.pruned:
            live.should_stop_early(row)
        if live.is_stopped(repeat) and row.state != State.SUCCEEDED.value:
            live.retry(repeat)
            return
        outcome = trials.outcome_of(row, self.record.sweep.objective)
        attempts = live.attempt(repeat) + 1
        if outcome.lost and attempts <= self.record.sweep.retries and not live.pruned:
            self.tell(f"trial {live.number}: {row.run} {outcome.reason}; restarting it")
            live.retry(repeat)
            return
        live.results[repeat] = outcome

    def _prune(self, live: Live, row: Run) -> None:
        """Cancel a run if the pruner says so; retry at the next query if the backend is silent."""
        if not self._prunes or not (live.pruned or live.should_stop_early(row)):
            return
        self._changed = True
        try:
            run_state.cancel(row)
        except DeploykitError as error:
            self._say_once(f"trial {live.number}: could not cancel {row.run}: {error.message}")

    @property
    def _limit(self) -> int:
        """Maximum number of runs at a time."""
        parallel = self.record.sweep.parallel
        return min(parallel, len(self.slots)) if self.slots else parallel

    @property
    def _prunes(self) -> bool:
        return self.record.sweep.pruner != "none"

    def _finish(self, live: Live) -> None:
        ids = [
            live.run(repeat, n) for repeat in live.repeats for n in range(live.attempt(repeat) + 1)
        ]
        rows = list(registry.lookup(*ids).values())
        charged = self.budget.committed(rows)
        self._ended += charged
        live.keep_cost(trial_job.total(rows), charged)
        known = self.record.sweep.parameters
        settings = " ".join(
            f"{name}={space.brief(known[name], it)}" for name, it in live.values.items()
        )
        end = live.tell(self.study)
        self.tell(f"trial {live.number}: {end} ({settings})")
        self._stop_if_alike(live)

    def _stop_if_alike(self, live: Live) -> None:
        """Stop the sweep if each trial so far has failed in the same way before any step."""
        failure = live.early_failure
        if self._early is None or failure is None or failure[1] != (self._early or failure[1:])[0]:
            self._early = None
            return
        self._early.append(failure[1])
        if len(self._early) == ALIKE and self._number < self._last:
            why = (
                f"the first {ALIKE} trials all failed in the same way before any step: {failure[0]}"
            )
            self.study.set_user_attr(HALTED, why)
            self.tell(f"stopping the sweep: {why}")
            self.record.ask_to_stop()

    def _begin(self) -> None:
        """Begin trials while slots and budget allow."""
        sweep, busy, committed = self.record.sweep, self._busy(), self._committed()
        most = max(self._limit, self._array)
        while busy < most and self._number < self._last:
            if not self.budget.allows(committed, sweep.repeat):
                self._say_once(
                    "not starting more trials, because the next could exceed max_cost "
                    f"({self.budget.cap})"
                )
                if not self.live:
                    self.study.set_user_attr(CAPPED, True)
                return
            self.live.append(trials.begin(self.record, self.study, self._number))
            self._number += 1
            busy, committed = busy + sweep.repeat, committed + sweep.repeat * self.budget.worst
            self._changed = True

    def _busy(self) -> int:
        """Number of slots in use."""
        return sum(len(live.open) for live in self.live)

    def _committed(self) -> Decimal:
        """Cost of all runs, with the worst case for unfinished ones."""
        past = [
            live.run(repeat, attempt)
            for live in self.live
            for repeat in live.repeats
            for attempt in range(live.attempt(repeat) + (repeat in live.results))
        ]
        return (
            self._ended
            + self.budget.committed(registry.lookup(*past).values())
            + self._busy() * self.budget.worst
        )

    def _submit_all(self, rows: dict[str, Run]) -> None:
        """Submit runs that were not sent yet, while slots are free.

        Raises the last error if all are refused and no other run is in progress.
        """
        every = [(live, repeat) for live in self.live for repeat in live.open]
        unsent = [one for one in every if _was_not_sent(rows.get(one[0].run(one[1])))]
        going = len(every) - len(unsent)
        room = max(0, self._limit - going)
        if room and min(len(unsent), self._array) > 1:
            self._submit_array(unsent[: self._array], room)
            return
        errors = [self._submit(*one) for one in unsent[:room]]
        if not going and errors and all(errors) and errors[-1] and not errors[-1].transient:
            raise errors[-1]

    def _submit(self, live: Live, repeat: int) -> DeploykitError | None:
        """Submit a run. Return the error if that failed."""
        run, first = live.run(repeat), live.run(repeat, 0)
        try:
            lifecycle.submit(trial_job.plan(self.base, run, self._passed(live, repeat), first))
        except Uncertain:
            return None  # `refresh` finds out whether the job exists
        except DeploykitError as error:
            self._say_once(f"trial {live.number} was not submitted: {error.message}")
            return error
        self._changed = True
        return None

    def _submit_array(self, unsent: Sequence[tuple[Live, int]], room: int) -> None:
        """Submit runs as one job array. If it is refused, the next one is half as long."""
        plans = [
            trial_job.plan(self.base, live.run(n), self._passed(live, n), live.run(n, 0))
            for live, n in unsent
        ]
        array = lifecycle.Array(self.record.new_array(), self.record.id, room)
        self._changed = True
        try:
            lifecycle.submit_array(array, plans)
        except Uncertain:
            pass  # `refresh` finds out whether the job exists
        except DeploykitError as error:
            self._array = self._array if error.transient else len(plans) // 2
            self._say_once(f"{len(plans)} runs were not submitted as a job array: {error.message}")

    def _passed(self, live: Live, repeat: int) -> space.Passed:
        """What a run adds to the job, including the variables of its slot."""
        passed = live.passed(repeat)
        if self.slots:
            if live.slot(repeat) is None:
                taken = {one.slot(other) for one in self.live for other in one.open}
                live.assign_slot(repeat, min(set(range(len(self.slots))) - taken))
            passed.env.update(self.slots[(live.slot(repeat) or 0) % len(self.slots)])
        return passed

    def _stop(self) -> bool:
        """Cancel all runs. Return whether any is still running."""
        rows = self._rows()
        left, cancelled = False, []
        for live in self.live:
            for repeat in live.open:
                row = rows.get(live.run(repeat))
                if row is None or _is_over(row) or row.handle is None:
                    continue
                left = True
                if row.state == State.STOPPING.value:
                    continue
                if not live.is_stopped(repeat):
                    live.mark_stopped(repeat)
                    self.tell(f"trial {live.number}: cancelling {row.run}")
                cancelled.append(row)
        try:
            run_state.cancel_all(cancelled)
        except DeploykitError as error:
            self._say_once(f"could not cancel {len(cancelled)} runs: {error.message}")
        return left

    def _say_once(self, text: str) -> None:
        """Print a message unless it repeats the previous one."""
        if text != self._said:
            self._said = text
            self.tell(text)


def _is_over(row: Run) -> bool:
    """Whether a run was sent and has ended."""
    return State(row.state).final and row.id is not None


def _was_not_sent(row: Run | None) -> bool:
    return row is None or (row.state == State.UNSENT.value and row.id is None)
