"""The job of a sweep's trials: its checks before the start, its plan for each run, and its cost.

The plan of a run is the plan of the sweep's job with the trial's arguments and the run's id.
Unfinished runs count at their worst-case cost.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.backends import base as backend
from deploykit.bundle import archive as bundle
from deploykit.cost import money, prices
from deploykit.cost.cap import unusable, worst
from deploykit.cost.estimate import Estimate
from deploykit.cost.money import Money
from deploykit.job import checks
from deploykit.job.decode import as_data
from deploykit.job.file import JobFile
from deploykit.job.model import Bundle, JobSpec, Plan, Problem, State
from deploykit.job.spelling import did_you_mean
from deploykit.lib import paths
from deploykit.lib.errors import DeploykitError, JobFileError, NotFound
from deploykit.run import lifecycle, registry
from deploykit.run.registry import Run, may_still_come
from deploykit.sweep import folder, space
from deploykit.sweep.file import SweepFile
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.model import Sweep
from deploykit.sweep.space import Passed


class Base(NamedTuple):
    """The job of a sweep, without the parameters of a trial."""

    backend: str
    job: JobSpec
    options: Any
    bundle: Bundle

    @classmethod
    def of(cls, plan: Plan) -> Base:
        return cls(plan.backend, plan.job, plan.options, plan.bundle)

    @property
    def estimate(self) -> Estimate | None:
        """What a run may cost; None if the backend has no prices."""
        return lifecycle.estimate(backend.find(self.backend), self.job, self.options)


@contextlib.contextmanager
def of(record: SweepRecord) -> Iterator[Base]:
    """Prepare the job of a sweep with the source it was started with; valid within the context.

    Raises NotFound if that source was deleted.
    """
    with contextlib.suppress(JobFileError):  # the folder may have changed, or be gone
        prepared = _prepared(record, {})
        if prepared.bundle.hash == record.bundle:
            yield prepared
            return
    archive = bundle.kept(record.bundle)
    if archive is None:
        raise NotFound(
            f"the source of sweep {record.id} is no longer in {paths.bundles()}",
            hint="start a new sweep",
        )
    with tempfile.TemporaryDirectory(dir=paths.private_folder(paths.bundles())) as scratch:
        bundle.unpack(archive, Path(scratch, "source"))
        yield _prepared(record, {"source": str(Path(scratch, "source"))})


def _prepared(record: SweepRecord, keys: Mapping[str, str]) -> Base:
    prepared = lifecycle.prepare({**record.job, **keys}, (), record.backend, record.id)
    return Base.of(prepared.plan)


def slots(base: Base) -> Sequence[Mapping[str, str]]:
    """Return the variables of each slot of the machine; empty if all slots are the same."""
    engine = backend.find(base.backend)
    return engine.slots(base.job, base.options) if backend.offers(engine, "slots") else ()


def largest_array(base: Base) -> int:
    """Return the maximum number of the job's runs in one job array; 0: no arrays."""
    engine = backend.find(base.backend)
    if base.job.budget is not None or not backend.offers(engine, "submit_array"):
        return 0
    try:
        return engine.largest_array(base.options)
    except DeploykitError:  # `submit` reports the reason
        return 0


def _sees_run_folders(base: Base) -> bool:
    engine = backend.find(base.backend)
    return backend.offers(engine, "check_function") and not any(engine.check_function(base.options))


def plan(base: Base, run: str, passed: Passed, first: str) -> Plan:
    """Plan the run `run` of a trial, whose first attempt had the run id `first`.

    Each trial has its own locations, so none resumes from another. A later attempt finds the
    checkpoints of the first if its nodes can read the run folder.
    """
    engine, entry = backend.find(base.backend), base.job.entrypoint
    output, checkpoints = base.job.output, base.job.checkpoints
    if checkpoints is not None:
        checkpoints = f"{checkpoints.rstrip('/')}/{first}"
    elif run != first and _sees_run_folders(base):
        checkpoints = str(paths.run_folder(first) / "checkpoints")
    job = replace(
        base.job,
        entrypoint=replace(entry, args=(*entry.args, *passed.arguments)),
        env={**base.job.env, **passed.env},
        output=None if output is None else f"{output.rstrip('/')}/{run}",
        checkpoints=checkpoints,
        notify=None,  # of the sweep, not of each trial
    )
    return engine.plan(job, base.options, run=run, bundle=base.bundle)


class Request(NamedTuple):
    overrides: tuple[str, ...] = ()
    backend: str | None = None
    id: str | None = None
    arguments: tuple[str, ...] = ()
    """Arguments for the script of every trial, after the job's and before the parameters."""
    dry: bool = False
    """True: do not pack the source."""


class Defined(NamedTuple):
    record: SweepRecord
    base: Base
    warnings: list[Problem]


def define(file: SweepFile, request: Request) -> Defined:
    """Define the sweep of a file without storing it yet. Packs the source.

    Raises NotFound, UsageError, or JobFileError with every problem of the job, then of the sweep.
    """
    own = Path(file.sweep.job)
    source = own if file.folder == Path.cwd() else file.folder / own  # as messages name it
    overrides = request.overrides
    if request.arguments:
        overrides = (*overrides, _with_arguments(source, overrides, request.arguments))
    prepared = lifecycle.prepare(source, overrides, request.backend, None, pack=not request.dry)
    base = Base.of(prepared.plan)
    problems = [
        *_cap_problems(file.sweep, base),
        *_unknown_options(file.sweep, base),
        *_problems_of_trials(file.sweep, base),
    ]
    if any(problem.severity == "error" for problem in problems):
        raise JobFileError(str(file.source), problems)
    chosen = request.id
    record = SweepRecord(
        folder.checked_id(chosen) if chosen else folder.new_id(file.sweep.name or base.job.name),
        file.sweep,
        base.backend,
        {**as_data(base.job), base.backend: as_data(base.options)},
        str(source.absolute()),
        overrides,
        base.bundle.hash,
        registry.now(),
    )
    return Defined(record, base, [*prepared.warnings, *problems])


def _with_arguments(source: Path, overrides: Sequence[str], arguments: Sequence[str]) -> str:
    """Return the override that appends `arguments` to the job's, as the sweep stores it."""
    entry = lifecycle.read(source, overrides).data.get("entrypoint")
    own = entry.get("args") if isinstance(entry, dict) else None
    words = [*(own if isinstance(own, list) else ()), *arguments]
    return f"entrypoint.args={json.dumps(words)}"


def first_plan(defined: Defined) -> Plan:
    """Plan the first trial, with middle values where a sampler would choose."""
    sweep = defined.record.sweep
    values = next(space.points(sweep.parameters), {}) if sweep.sampler == "grid" else None
    if values is None:
        values = space.choose(sweep.parameters, lambda _, one: space.at(one, 0.5))
    run = f"{defined.record.id}-0"
    return plan(defined.base, run, space.passed(sweep.parameters, values), run)


def worst_cost(sweep: Sweep, base: Base) -> str | None:
    """Describe the maximum cost of a sweep and its calculation; None if nothing is billed."""
    estimate = base.estimate
    if estimate is None or not (estimate.charges or estimate.unknown):
        return None
    one, count = worst(base.job, estimate), space.trials(sweep)
    if one is None:
        return f"cost: {'unknown' if estimate.unknown else 'no limit'}, {count} trials"
    runs = count * sweep.repeat * (1 + sweep.retries)
    total = Money(runs * one, estimate.currency)
    how = f"{count} trials x {money.text(one, estimate.currency)}"
    how += f" x {sweep.repeat} repeats" if sweep.repeat > 1 else ""
    how += f" x {1 + sweep.retries} attempts" if sweep.retries else ""
    if sweep.max_cost is not None and money.parse(sweep.max_cost).amount < total.amount:
        return f"cost: at most {money.parse(sweep.max_cost)} (max_cost); without it, {total}: {how}"
    return f"cost: at most {total}: {how}"


def keep(defined: Defined) -> None:
    """Store a new sweep and its source, so it can be started, and resumed from any folder."""
    bundle.store(defined.base.bundle)
    folder.create(defined.record)


def _unknown_options(sweep: Sweep, base: Base) -> Iterator[Problem]:
    """Yield parameters that the script refuses, where its source shows all options it has."""
    script = base.job.entrypoint.script
    try:
        text = Path(base.job.source, script or "").read_bytes() if script else b""
    except OSError:
        return
    options = checks.argparse_options(text)
    if options is None:
        return
    for name, one in sweep.parameters.items():
        added = space.Passed([], {})
        space.add(added, one.as_ or space.default_form(name), "VALUE")
        for word in added.arguments:
            option = word.partition("=")[0]
            if option.startswith("--") and not any(known.startswith(option) for known in options):
                hint = did_you_mean(option, options) or f"options: {', '.join(options[1:])}"
                yield Problem(f"parameters.{name}", f"{script} has no option {option}", hint)


def _problems_of_trials(sweep: Sweep, base: Base) -> Iterator[Problem]:
    """Yield problems that a trial's parameters add to the job."""
    values = space.choose(sweep.parameters, lambda _, one: space.at(one, 0.5))
    passed = space.passed(sweep.parameters, values)
    entry = replace(base.job.entrypoint, args=(*base.job.entrypoint.args, *passed.arguments))
    job = replace(base.job, entrypoint=entry, env={**base.job.env, **passed.env})
    file = JobFile(base.job.__dict__, job, {base.backend: base.options}, {}, {})
    before = set(map(str, lifecycle.problems(file._replace(job=base.job), base.backend)))
    for problem in (*checks.check_variables(job), *lifecycle.problems(file, base.backend)):
        if str(problem) not in before:
            yield problem


class Budget(NamedTuple):
    """The cap of a sweep, and the maximum cost of each run."""

    cap: Money | None = None
    worst: Decimal = Decimal(0)
    """Maximum cost of one run, in the currency of the cap."""

    def committed(self, rows: Iterable[Run]) -> Decimal:
        """Return the cost of these runs, with the worst case for unfinished ones."""
        return sum((self._of(row) for row in rows), Decimal(0))

    def allows(self, committed: Decimal, runs: int) -> bool:
        """Return whether `runs` more runs fit below the cap."""
        return self.cap is None or committed + runs * self.worst <= self.cap.amount

    def _of(self, row: Run) -> Decimal:
        if row.state == State.UNSENT.value and not may_still_come(row):
            return Decimal(0)
        known = _spent(row) if State(row.state).final else None
        return self.worst if known is None else known.amount


def total(rows: Iterable[Run]) -> Money | None:
    """Return the known cost of runs so far; None if nothing is billed."""
    costs = map(_spent, rows)
    return sum_of(Money(one.amount, one.currency) for one in costs if one is not None)


def sum_of(amounts: Iterable[Money]) -> Money | None:
    """Return the sum of amounts in one currency; None if there are none."""
    known = list(amounts)
    if not known:
        return None
    return Money(sum((one.amount for one in known), Decimal(0)), known[0].currency)


def _spent(row: Run) -> prices.Spent | None:
    return prices.spent(Path(row.folder, backend.PRICE), row.billed)


def budget(sweep: Sweep, base: Base) -> Budget:
    """Return the budget of a sweep that passed `define`."""
    estimate = base.estimate
    if sweep.max_cost is None or estimate is None or not estimate.charges:
        return Budget()
    return Budget(money.parse(sweep.max_cost), worst(base.job, estimate) or Decimal(0))


def _cap_problems(sweep: Sweep, base: Base) -> Iterator[Problem]:
    """Yield reasons why the cap of a sweep cannot be kept."""
    if sweep.max_cost is None:
        return
    estimate, limit = base.estimate, money.parse(sweep.max_cost)
    if problem := unusable("max_cost", limit, estimate, "50 {}"):
        yield problem
    elif estimate is None:
        return
    elif (most := worst(base.job, estimate)) is None:
        message = "cannot be enforced: the cost of a run has no upper bound"
        yield Problem("max_cost", message, "set a time limit, or set max_cost and stop_at_cap")
    elif sweep.repeat * most > limit.amount:
        each = money.text(sweep.repeat * most, limit.currency)
        hint = (
            "raise it, reduce the time limit or number of restarts, or set stop_at_cap in the job"
        )
        yield Problem(
            "max_cost", f"{limit} is less than the {each} that one trial could cost", hint
        )
