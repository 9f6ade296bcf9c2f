"""The life of a run: prepare, submit, refresh, wait, cancel. Nothing here prints."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from deploykit import backend, bundle, jobfile, paths, registry, run_record, secret_scan
from deploykit.backend import Backend
from deploykit.decode import encodable
from deploykit.errors import (
    DeploykitError,
    JobFileError,
    NeverStarts,
    NotFound,
    TryAgain,
    Uncertain,
    UsageError,
)
from deploykit.jobfile import Draft, JobFile, Overrides, Source
from deploykit.model import Bundle, JobSpec, Plan, Problem, State, Status
from deploykit.registry import Run
from deploykit.run_record import submitting

if TYPE_CHECKING:
    from deploykit.capabilities import Cost
    from deploykit.cost.estimate import Estimate

_BLOCKED = 10.0
"""Seconds after which `wait` leaves a run that can never start: reasons change at first."""
LAST_KNOWN = "last known;"
"""Begins the reason of a run whose backend does not answer."""
_TIME_LIMIT = 3600
"""Seconds assumed where a required time limit is missing, so that the rest can be checked."""
_POLL = (0.2, 15.0)
"""Shortest and longest interval between two status queries, in seconds."""


class Prepared(NamedTuple):
    """A plan and its warnings."""

    plan: Plan
    warnings: list[Problem]
    source: Source = Path()
    """The job file, or the job without one."""


def read(job: Source, overrides: Overrides) -> Draft:
    """A job as plain data. A script is one too; an entrypoint in `overrides` needs no file."""
    lacking = job == Path(jobfile.DEFAULT) and not Path(jobfile.DEFAULT).exists()
    if isinstance(job, Path) and (lacking or job.suffix == ".py"):
        from deploykit import script_job  # rarely needed

        return script_job.read(job, overrides)
    return jobfile.read(job, overrides)


def with_defaults(draft: Draft) -> Draft:
    """The draft with the user's defaults for what it does not set. Raises ConfigError."""
    path = paths.config()
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return draft
    except OSError:
        pass  # `config.read` says why
    from deploykit import config  # most have none

    return config.filled(draft, config.read(path))


def load(
    job: Source, overrides: Overrides, names: Sequence[str], arguments: Sequence[str] = ()
) -> JobFile:
    """Read a job with the sections of the backends `names`; without, of those that it has.

    A job with no section gets that of the backend to use. `arguments` go to the trainer, after
    those of the job. Raises NotFound, UsageError (an override) or JobFileError with every problem.
    """
    draft = with_defaults(read(job, overrides))
    if not names:
        own = set(draft.data).difference(draft.origins)
        sections = [name for name in backend.names() if name in own]
        names = sections or [_chosen(draft.data)]
    return _load(draft, names, arguments)


def _load(draft: Draft, names: Sequence[str], arguments: Sequence[str]) -> JobFile:
    if not all(map(encodable, arguments)):
        raise UsageError("an argument of the trainer is not UTF-8 text")
    options = {name: backend.find(name).Options for name in names}
    file = jobfile.load(
        draft, options=options, backends=backend.names, check=lambda it: examine(it)[0]
    )
    entry = replace(file.job.entrypoint, args=(*file.job.entrypoint.args, *arguments))
    return file._replace(job=replace(file.job, entrypoint=entry))


def chosen(name: str | None, job: Mapping[str, Any] | None = None) -> str:
    """The backend to use: `name`, else that of a job's data, the user's default, or local."""
    return name or _chosen(with_defaults(Draft(Path(), dict(job or {}), {})).data)


def _chosen(data: Mapping[str, Any]) -> str:
    """The same, of data that have the user's defaults."""
    own = data.get("backend")
    from_job = own if isinstance(own, str) else None  # anything else is a problem of the job
    return from_job or os.environ.get("DEPLOYKIT_BACKEND") or backend.DEFAULT


def check(file: JobFile, name: str) -> list[Problem]:
    """The warnings of one backend. Raises JobFileError with every problem if one is an error."""
    secrets = secret_scan.check(file.job, {name: file.sections[name]})
    return file.raise_on([*problems(file, name), *secrets])


def check_all(file: JobFile) -> list[Problem]:
    """The warnings of all its backends and of the bundle. Raises as `check`, for all at once."""
    found, packed = examine(file)
    warnings = file.raise_on(found)
    for name, options in file.sections.items():
        if packed is not None:  # what shows only in the text that would be sent
            backend.find(name).plan(file.job, options, run="check", bundle=packed)
    return warnings


def problems(file: JobFile, name: str) -> Iterator[Problem]:
    """What one backend finds wrong with a job, and what of the job it does not offer."""
    engine, job = backend.find(name), file.job
    if not job.resources.time_limit and not _offers(engine, "Unlimited"):
        hint = "for example time_limit: 30m, or --time-limit 30m"
        yield Problem("resources.time_limit", "is required", hint)
        job = replace(job, resources=replace(job.resources, time_limit=_TIME_LIMIT))
    yield from engine.check(job, file.sections[name])
    if job.preflight and not _offers(engine, "Preflight"):
        yield Problem("preflight", f"backend {name} does not offer `preflight`", "remove it")
    if job.max_cost is not None or job.budget is not None or job.stop_at_cap:
        from deploykit.cost import cap  # few jobs have one

        yield from cap.problems(job, estimate(engine, job, file.sections[name]))


def estimate(engine: Backend, job: JobSpec, options: Any) -> Estimate | None:
    """What a job may cost; None where the backend does not say."""
    if not _offers(engine, "Cost"):
        return None
    return cast("Cost", engine).cost(job, options)


def billed(plan: Plan) -> Estimate | None:
    """What a plan may cost; None where nothing is billed, or the backend does not say."""
    engine = backend.find(plan.backend)
    bills = getattr(engine, "bills", None)  # without importing all capabilities
    return estimate(engine, plan.job, plan.options) if bills and bills(plan.options) else None


def _offers(engine: Backend, capability: str) -> bool:
    from deploykit import capabilities  # most jobs require none

    return isinstance(engine, getattr(capabilities, capability))


def examine(file: JobFile) -> tuple[list[Problem], Bundle | None]:
    """Every problem of a job on the backends of its sections, and its bundle if it has one."""
    found = [problem for name in file.sections for problem in problems(file, name)]
    found += secret_scan.check(file.job, file.sections)
    try:
        packed = bundle.scan(Path(file.job.source), file.job.max_bundle)
    except JobFileError as error:
        return [*found, *error.problems], None
    return [*found, *packed.warnings], packed


def refuse(job: Source, warnings: Sequence[Problem]) -> None:
    """Raise JobFileError if there is any warning, as ``--strict`` demands."""
    if warnings:
        problems = [replace(problem, severity="error") for problem in warnings]
        raise JobFileError(jobfile.title(job), problems, hint="with `strict`, warnings are errors")


def prepare(
    job: Source,
    overrides: Overrides,
    name: str | None,
    run: str | None,
    arguments: Sequence[str] = (),
) -> Prepared:
    """Everything up to the plan, for the backend `name`, or else the one that the job names.

    Only reads files. Raises JobFileError with every problem.
    """
    draft = with_defaults(read(job, overrides))
    name = name or _chosen(draft.data)
    file = _load(draft, [name], arguments)
    found, packed = examine(file)
    warnings = file.raise_on(found)
    assert packed is not None  # noqa: S101 - for mypy: else there was an error
    identity = registry.checked_id(run) if run else registry.new_id(file.job.name)
    plan = backend.find(name).plan(file.job, file.sections[name], run=identity, bundle=packed)
    if paths.left_out().exists():
        from deploykit import left_out  # most users have none

        plan, more = left_out.applied(plan)
        warnings = [*warnings, *more]
    return Prepared(plan, warnings, file.path)


def submit(plan: Plan) -> Run:
    """Send a plan once: a second submit of the same run id returns the run that the first started.

    Raises UsageError where the id belongs to another job or the budget has too little left,
    TryAgain while another process submits it, and whatever the backend raises.
    """
    folder = paths.private_folder(paths.run_folder(plan.run))
    with submitting(folder, plan.run):
        row = _claim(plan, folder)
        if row.id is None:
            run_record.write(plan, folder, billed(plan))
            _send(plan, folder)
    return registry.known(plan.run)


def _claim(plan: Plan, folder: Path) -> Run:
    """The row of the run: a new one, or that of an earlier submit, reconciled."""
    row = new_row(plan, folder)
    if registry.add(row):
        return row
    earlier = registry.known(plan.run)
    if (earlier.backend, earlier.plan) != (row.backend, row.plan):
        raise UsageError(
            f"the run id {plan.run} belongs to a different job", hint="choose another run id"
        )
    if earlier.id is None:
        _reconcile(backend.find(plan.backend), earlier)
    return registry.known(plan.run)


def new_row(plan: Plan, folder: Path) -> Run:
    """The row of a run that was not sent yet."""
    return Run(
        *(plan.run, plan.job.name, plan.backend, plan.target, str(folder)),
        *(hashlib.sha256(plan.text.encode()).hexdigest(), plan.bundle.hash, plan.bundle.commit),
        *(registry.now(), plan.output),
    )


def attach(run: str, name: str, target: str | None) -> Run:
    """The run, which another machine may have submitted to the backend `name`.

    Raises UsageError where the backend does not offer this, NotFound where there is no such run.
    """
    from deploykit import capabilities  # only to attach

    engine = capabilities.require(name, capabilities.Attach)
    if not registry.lookup(run):
        folder = paths.run_folder(registry.checked_id(run))
        handle = engine.attach(run, folder, target)
        paths.private_folder(folder)
        where = handle.target
        registry.add(Run(run, run, name, where, str(folder), "", "", None, registry.now(), ""))
        registry.confirm(run, handle.id)
    return refresh([registry.known(run)])[0]


def _send(plan: Plan, folder: Path) -> None:
    try:
        if plan.job.budget is not None:
            from deploykit import budgets  # few jobs have one

            budgets.reserve(plan, billed(plan), refresh)
        handle = backend.find(plan.backend).submit(plan, folder)
    except (Uncertain, TryAgain):
        raise  # the job may exist: the row stays as it is, and `refresh` asks again
    except DeploykitError as error:
        registry.update(plan.run, Status(State.UNSENT, "", error.message))
        raise
    registry.confirm(plan.run, handle.id, handle.status)


def refresh(rows: Sequence[Run]) -> list[Run]:
    """The same runs with their current status: one query to each backend.

    Where a backend cannot be reached, its runs keep their last known state, and the reason says so.
    """
    unfinished: dict[str, list[Run]] = defaultdict(list)
    for row in rows:
        if not State(row.state).final or registry.may_still_come(row):
            unfinished[row.backend].append(row)
    failures: dict[str, str] = {}
    for name, group in unfinished.items():
        try:
            failures |= _refresh(backend.find(name), group)
        except (DeploykitError, OSError) as error:
            failures |= {row.run: _last_known(name, error) for row in group}
    current = registry.lookup(*(row.run for row in rows))
    asked = (row.run for group in unfinished.values() for row in group)
    ended = [current[run] for run in asked if run in current and State(current[run].state).final]
    if ended:
        from deploykit import left_out, storage  # only the end of a run needs them

        left_out.learn(ended)
        storage.tidy()
    # another process may have removed a run that has ended
    return [_with_reason(current.get(row.run, row), failures.get(row.run)) for row in rows]


def _last_known(name: str, error: Exception) -> str:
    return f"{LAST_KNOWN} {name} cannot be reached: {error}"


def _with_reason(row: Run, reason: str | None) -> Run:
    """The row with the reason of a failed query, and a note where its run folder was deleted."""
    parts = [row.reason if reason is None else reason]
    if not Path(row.folder).exists() and row.folder not in parts[0]:
        parts.append(f"its folder {row.folder} was deleted")
    return replace(row, reason="; ".join(filter(None, parts)))


def _refresh(engine: Backend, rows: list[Run]) -> dict[str, str]:
    """Update the runs of one backend; the reasons, by run, where that failed."""
    failures = {}
    for row in rows:
        if row.id is None:
            try:
                with contextlib.suppress(TryAgain), submitting(Path(row.folder), row.run):
                    _reconcile(engine, row)
            except DeploykitError as error:
                failures[row.run] = _last_known(row.backend, error)
    handles = {
        row.handle: row
        for row in registry.lookup(*(row.run for row in rows)).values()
        if row.handle is not None
    }
    if not handles:
        return failures
    status_by_handle = engine.status(list(handles))
    pairs = ((row, status_by_handle[handle]) for handle, row in handles.items())
    registry.update_all({row.run: status for row, status in pairs if status != row.status})
    return failures


def _reconcile(engine: Backend, row: Run) -> None:
    """Find the job of an interrupted submit, and record whether it exists."""
    handle = engine.find(row.run, Path(row.folder), row.target)
    if handle is not None:
        registry.confirm(row.run, handle.id)
        return
    if row.state != State.UNSENT.value:  # else it keeps its reason
        reason = "submit was interrupted before anything was sent; submit it again"
        registry.update(row.run, Status(State.UNSENT, "", reason))


def wait_all(names: Sequence[str], timeout: float | None = None) -> Iterator[list[Run]]:
    """The runs, each time one has changed, until all have ended or stay blocked, or `timeout` s."""
    end, leave = (math.inf if timeout is None else time.monotonic() + timeout), math.inf
    pause, longest = _POLL
    last: list[Run] = []
    while True:
        found = registry.lookup(*names)
        rows = refresh([found.get(name) or registry.known(name) for name in names])
        if rows != last:
            yield rows
            last, pause = rows, _POLL[0]
        now = time.monotonic()
        states = {State(row.state) for row in rows if not State(row.state).final}
        leave = min(leave, now + _BLOCKED) if states == {State.BLOCKED} else math.inf
        if not states or now >= min(end, leave):
            return
        time.sleep(pause)
        pause = min(pause * 1.3, longest)


def cancel(row: Run) -> Run:
    """Stop a run, unless it has ended. Raises NotFound where no job was sent."""
    row = refresh([row])[0]
    if row.handle is None:
        raise NotFound(f"{row.run} was never sent", hint=row.reason or None)
    if not State(row.state).final:
        backend.find(row.backend).cancel(row.handle)
        row = refresh([row])[0]
    return row


def exit_code(row: Run) -> int:
    """The exit code of `wait`: the trainer's, or one for how the run ended; 1 if it is unknown."""
    if row.state == State.SUCCEEDED.value:
        return 0
    if row.state == State.BLOCKED.value:
        return NeverStarts.exit_code
    if row.state == State.CANCELLED.value:
        return 143
    return row.exit_code or 1
