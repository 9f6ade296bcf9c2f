"""From a job file to a run that was sent: read, check, prepare, submit. Nothing here prints."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from deploykit.backends import base as backend
from deploykit.backends.base import Backend
from deploykit.bundle import archive as bundle
from deploykit.bundle import data_folder, revision, secret_scan
from deploykit.cost import cap
from deploykit.cost.estimate import Estimate
from deploykit.job import file as jobfile
from deploykit.job import script as script_job
from deploykit.job.decode import as_data, encodable
from deploykit.job.file import Draft, JobFile, Overrides, Source
from deploykit.job.model import Bundle, JobSpec, Plan, Problem, State, Status
from deploykit.job.settings import settings
from deploykit.lib import paths, shell, units
from deploykit.lib.errors import DeploykitError, JobFileError, TryAgain, Uncertain, UsageError
from deploykit.run import budgets, config, excluded_nodes, registry
from deploykit.run import state as run_state
from deploykit.run.registry import Run

_MUCH_DATA = 10_000_000_000
"""Bytes of data above which an upload has to be confirmed."""
_TIME_LIMIT = 3600
"""Seconds assumed if a required time limit is missing, so that the rest can be checked."""
_MAX_OTHER_RUNS = 1000
_MAX_DIFFERENCES = 5
_LOCAL = {"source", "backend"}
"""Keys of a job that are not part of what is sent."""
_NO_YAML = "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]"
"""Characters of JSON that YAML knows only as escapes; it does not know JSON's pairs of surrogates.

https://yaml.org/spec/1.2.2/#51-character-set
"""


class Prepared(NamedTuple):
    plan: Plan
    warnings: list[Problem]
    source: Source = Path()
    """The job file, or the job without one."""
    others: Sequence[str] = ()
    """If nobody chose the backend of the plan: those that have a section in the job instead."""


def read(job: Source, overrides: Overrides) -> Draft:
    """A job as plain data. A script is one too; an entrypoint in `overrides` needs no file."""
    lacking = job == Path(jobfile.DEFAULT) and not Path(jobfile.DEFAULT).exists()
    if isinstance(job, Path) and (lacking or job.suffix == ".py"):
        return script_job.read(job, overrides)
    return jobfile.read(job, overrides)


def with_defaults(draft: Draft) -> Draft:
    """The draft with the user's defaults for what it does not set. Raises ConfigError."""
    path = paths.config()
    return config.filled(draft, config.read(path)) if os.path.lexists(path) else draft


def load(
    job: Source, overrides: Overrides, names: Sequence[str], arguments: Sequence[str] = ()
) -> JobFile:
    """Read a job with the sections of the backends `names`; by default of those that it names.

    `arguments` go to the trainer, after those of the job. Raises NotFound, UsageError (an override)
    or JobFileError with every problem.
    """
    draft = with_defaults(read(job, overrides))
    return _load(draft, names or _named(draft), arguments)


def named(job: Source, overrides: Overrides) -> list[str]:
    """The backends of a job when none is given: its `backend` and sections, else the default."""
    return _named(with_defaults(read(job, overrides)))


def _named(draft: Draft) -> list[str]:
    own = set(draft.data).difference(draft.origins)
    sections = [name for name in backend.names() if name in own]
    if "backend" in own and (first := _chosen(draft.data)) not in sections:
        return [first, *sections]
    return sections or [_chosen(draft.data)]


def _load(draft: Draft, names: Sequence[str], arguments: Sequence[str]) -> JobFile:
    if not all(map(encodable, arguments)):
        raise UsageError("a trainer argument is not valid UTF-8")
    options = {name: backend.find(name).Options for name in names}
    file = jobfile.load(
        draft, options=options, backends=backend.names, check=lambda file: examine(file)[0]
    )
    for location in (file.job.source, *backend.locations(file.job).values()):
        if why := paths.not_text(location):
            raise UsageError(f"the folder {why}")
    entry = replace(file.job.entrypoint, args=(*file.job.entrypoint.args, *arguments))
    return file._replace(job=replace(file.job, entrypoint=entry))


def chosen(name: str | None, job: Mapping[str, Any] | None = None) -> str:
    """The backend to use: `name`, else that of a job's data, the user's default, or local."""
    return name or _chosen(with_defaults(Draft(Path(), dict(job or {}), {})).data)


def _chosen(data: Mapping[str, Any]) -> str:
    """The backend of a job's data, which have the user's defaults."""
    name = data.get("backend")
    from_job = name if isinstance(name, str) else None  # anything else is a problem of the job
    return from_job or os.environ.get("DEPLOYKIT_BACKEND") or backend.DEFAULT


def check(file: JobFile, name: str) -> list[Problem]:
    """The warnings of one backend. Raises JobFileError with every problem if one is an error."""
    secrets = secret_scan.check(file.job, {name: file.sections[name]})
    return file.raise_on([*problems(file, name), *secrets])


def check_all(file: JobFile) -> list[Problem]:
    """The warnings of all its backends and of the bundle. Raises as `check`, for all at once."""
    all_problems, packed = examine(file)
    warnings = file.raise_on([*all_problems, *_shared_checkpoints(file.job)])
    for name, options in file.sections.items():
        if packed is not None:  # what shows only in the text that would be sent
            plan = backend.find(name).plan(file.job, options, run="check", bundle=packed)
            warnings += _data_warnings(plan)
    return warnings


def _data_warnings(plan: Plan) -> list[Problem]:
    return [warning for folder in plan.data for warning in folder.warnings]


def problems(file: JobFile, name: str) -> Iterator[Problem]:
    """The problems of a job on one backend, and the features of the job that it does not offer."""
    engine, job = backend.find(name), file.job
    if not job.resources.time_limit and not backend.offers(engine, "UNLIMITED"):
        hint = "for example, `time_limit: 30m` or --time-limit 30m"
        yield Problem("resources.time_limit", "is required", hint)
        job = replace(job, resources=replace(job.resources, time_limit=_TIME_LIMIT))
    yield from engine.check(job, file.sections[name])
    if job.preflight and not backend.offers(engine, "PREFLIGHT"):
        yield Problem("preflight", f"backend {name} does not offer `preflight`", "remove it")
    if job.max_cost is not None or job.budget is not None or job.stop_at_cap:
        yield from cap.problems(job, estimate(engine, job, file.sections[name]))


def estimate(engine: Backend, job: JobSpec, options: Any) -> Estimate | None:
    """What a job may cost; None where the backend does not say."""
    return engine.cost(job, options) if backend.offers(engine, "cost") else None


def billed(plan: Plan) -> Estimate | None:
    """What a plan may cost; None if nothing is billed, or the backend does not say."""
    engine = backend.find(plan.backend)
    billed = backend.offers(engine, "bills") and engine.bills(plan.options)
    return estimate(engine, plan.job, plan.options) if billed else None


def examine(file: JobFile) -> tuple[list[Problem], Bundle | None]:
    """Every problem of a job on the backends of its sections, and its bundle if it has one."""
    all_problems = [problem for name in file.sections for problem in problems(file, name)]
    all_problems += secret_scan.check(file.job, file.sections)
    try:
        packed = bundle.scan(Path(file.job.source), file.job.max_bundle)
    except JobFileError as error:
        return [*all_problems, *error.problems], None
    return [*all_problems, *packed.warnings], packed


def _shared_checkpoints(job: JobSpec, run: str = "", *, ask: bool = False) -> list[Problem]:
    """A warning for each other unfinished run with the same location of checkpoints.

    With `ask`, the target of such a run is asked whether it has ended meanwhile.
    """
    if job.checkpoints is None:
        return []
    own, rows = _resolved(job.checkpoints), list[Run]()
    with contextlib.suppress(DeploykitError):  # an unreadable registry does not matter here
        others = (row for row in registry.unfinished(_MAX_OTHER_RUNS) if row.run != run)
        rows = [row for row in others if _resolved(row.job_data().get("checkpoints") or "") == own]
        rows = run_state.refresh(rows) if ask else rows
    return [
        Problem(
            "checkpoints",
            f"are also used by {row.run} (state: {row.state}); each run would delete the other's "
            "checkpoints",
            f"choose another folder; `deploykit status {row.run}` shows whether that run has ended",
            severity="warning",
        )
        for row in rows
        if not State(row.state).final
    ]


def _resolved(location: str) -> str:
    """A location in a form in which equal ones are equal."""
    if not location or paths.is_address(location):
        return location.rstrip("/")
    return os.path.realpath(location)


def refuse(job: Source, warnings: Sequence[Problem]) -> None:
    """Raise JobFileError if there is any warning, as ``--strict`` demands."""
    if warnings:
        problems = [problem._replace(severity="error") for problem in warnings]
        raise JobFileError(
            jobfile.title(job), problems, hint="warnings are errors because of `strict`"
        )


def prepare(  # noqa: PLR0913 - as submit
    job: Source,
    overrides: Overrides,
    name: str | None,
    run: str | None,
    arguments: Sequence[str] = (),
    *,
    pack: bool = False,
) -> Prepared:
    """Everything up to the plan, for the backend `name`, or else the one that the job names.

    Only reads files, unless `pack` says that the plan will be sent: then the source is packed, and
    the target is asked whether nodes to exclude still exist. Raises JobFileError with every
    problem.
    """
    draft = with_defaults(read(job, overrides))
    others = [] if name else _others(draft)
    name = name or _chosen(draft.data)
    file = _load(draft, [name], arguments)
    all_problems, packed = examine(file)
    warnings = file.raise_on(all_problems)
    assert packed is not None  # noqa: S101 - for mypy: else there was an error
    if pack:  # before there is a run, which a full disk would leave half submitted
        bundle.store(packed)
    identity = registry.checked_id(run) if run else registry.new_id(file.job.name)
    warnings += _shared_checkpoints(file.job, identity, ask=pack)
    plan = backend.find(name).plan(file.job, file.sections[name], run=identity, bundle=packed)
    warnings += _data_warnings(plan)
    if pack and plan.data:
        data_folder.remember(plan.data)
    if paths.left_out().exists():
        plan, excluded = excluded_nodes.applied(plan, ask=pack)
        warnings += excluded
    return Prepared(plan, warnings, file.path, others)


def _others(draft: Draft) -> list[str]:
    """The sections of backends in a job which names none, and has none of the default one."""
    if "backend" in draft.data or os.environ.get("DEPLOYKIT_BACKEND"):
        return []
    keys = {field.name for field in fields(JobSpec)}
    sections = [key for key in draft.data if key not in keys and key not in draft.origins]
    return [] if backend.DEFAULT in sections else sections


def much_data(plan: Plan) -> int:
    """Bytes of data to upload, if so many that the upload has to be confirmed; else 0.

    Asks the target what it has, but only about much data. Raises what the backend raises.
    """
    engine = backend.find(plan.backend)
    size = sum(folder.size for folder in plan.data)
    if size <= _MUCH_DATA or not backend.offers(engine, "unsent_data"):
        return 0
    unsent = engine.unsent_data(plan)
    return unsent if unsent > _MUCH_DATA else 0


def require_confirmation(plan: Plan) -> None:
    """Raise UsageError if the plan uploads much data, which nobody has confirmed."""
    if size := much_data(plan):
        raise UsageError(
            f"{plan.run} would upload {units.size(size)} of data, more than "
            f"{units.size(_MUCH_DATA)}; nothing was sent",
            hint="to confirm, use `deploykit submit --yes`, or yes=True in Python",
        )


def submit(plan: Plan, *, yes: bool = False) -> Run:
    """Send a plan once: a second submit of the same run id returns the run that the first started.

    Raises UsageError if the id belongs to another job, the budget has too little left, or much data
    would be uploaded without `yes`; TryAgain while another process submits it; and whatever the
    backend raises.
    """
    if not yes:
        require_confirmation(plan)
    folder = paths.private_folder(paths.run_folder(plan.run))
    with paths.submitting(folder, plan.run):
        try:
            if _claim(plan, folder).id is None:
                record(plan, folder, billed(plan), source_record(plan.bundle))
                _send(plan, folder)
        except KeyboardInterrupt as interrupt:
            look = f"`deploykit status {plan.run}` shows whether the run was started"
            interrupt.add_note(f"{plan.run}: interrupted during submit; {look}")
            raise
    return registry.known(plan.run)


def _claim(plan: Plan, folder: Path) -> Run:
    """The row of the run: a new one, or that of an earlier submit, reconciled."""
    row = new_row(plan, folder)
    if registry.add(row):
        return row
    earlier = registry.known(plan.run)
    if (earlier.backend, earlier.plan) != (row.backend, row.plan):
        differences = _differences(earlier, plan)
        details = f"; {'; '.join(differences)}" if differences else ""
        raise UsageError(
            f"the run id {plan.run} belongs to a different job{details}",
            hint="choose another run id",
        )
    if earlier.id is None:
        run_state.reconcile(backend.find(plan.backend), earlier)
    return registry.known(plan.run)


def _differences(earlier: Run, plan: Plan) -> list[str]:
    """What differs between a run and a plan with its id: settings of the job, and the source."""
    if earlier.backend != plan.backend:
        return [f"that run's backend is {earlier.backend}"]
    then = dict(settings(earlier.job_data(), without=_LOCAL))
    now = dict(settings(job_data(plan), without=_LOCAL))
    names = [name for name in {**then, **now} if then and then.get(name) != now.get(name)]
    sentences = [
        f"{name} differs"  # its value may be a secret
        if name.startswith("env.")
        else f"{name} was {then.get(name) or 'not set'}, now {now.get(name) or 'not set'}"
        for name in names[:_MAX_DIFFERENCES]
    ]
    if len(names) > _MAX_DIFFERENCES:
        sentences.append(f"and {len(names) - _MAX_DIFFERENCES} more settings differ")
    if earlier.bundle != plan.bundle.hash:
        sentences.append("the source files, or the versions of deploykit, differ")
    return sentences


def job_data(plan: Plan) -> dict[str, Any]:
    """The job of a plan, as JSON: what its run folder keeps."""
    data = json.dumps({**as_data(plan.job), plan.backend: as_data(plan.options)})
    return cast("dict[str, Any]", json.loads(data))


def new_row(plan: Plan, folder: Path) -> Run:
    return Run(
        run=plan.run,
        name=plan.job.name,
        backend=plan.backend,
        target=plan.target,
        folder=str(folder),
        plan=hashlib.sha256(plan.text.encode()).hexdigest(),
        bundle=plan.bundle.hash,
        revision=plan.bundle.commit,
        created=registry.now(),
        output=plan.output,
    )


def source_record(bundled: Bundle) -> dict[str, str | bytes]:
    """What a run folder keeps of a bundle, which is stored: the same for all runs of the bundle.

    ``source.json``, and its changes since its commit.
    """
    bundle.store(bundled)
    known: dict[str, Any] = {"bundle": bundled.hash, "commit": bundled.commit}
    files: dict[str, str | bytes] = {}
    if bundled.commit is not None:
        try:
            files["uncommitted.diff"], known["left_out"] = revision.patch(bundled)
        except DeploykitError as error:
            known["uncommitted"] = f"not recorded: {error}"
    return {**files, "source.json": json.dumps(known, indent=2) + "\n"}


def record(
    plan: Plan, folder: Path, price: Estimate | None, source: Mapping[str, str | bytes]
) -> None:
    """Write the plan, its job, and the source's changes since its commit, into the run folder.

    And its price now, since later prices may differ; None: nothing is billed.
    """
    paths.write(folder / f"plan.{plan.language}", plan.text)
    text = json.dumps(job_data(plan), indent=2, ensure_ascii=False) + "\n"
    paths.write(folder / backend.JOB, re.sub(_NO_YAML, lambda odd: f"\\u{ord(odd[0]):04x}", text))
    for name, content in source.items():
        paths.write(folder / name, content)
    if price is not None and (kept := price.record()):
        paths.write(folder / backend.PRICE, json.dumps(kept) + "\n")


def _send(plan: Plan, folder: Path) -> None:
    if plan.job.notify is not None:
        from deploykit.run import notify  # few jobs need it

        notify.announce(folder)  # a run may end before `follow` has begun
    try:
        if plan.job.budget is not None:
            budgets.reserve(plan, billed(plan), run_state.refresh)
        handle = backend.find(plan.backend).submit(plan, folder)
    except (Uncertain, TryAgain):
        raise  # the job may exist: the row stays as it is, and `refresh` asks again
    except DeploykitError as error:
        registry.update(plan.run, Status(State.UNSENT, "", error.message))
        if plan.job.notify is not None:
            _follow("notify", plan.run, folder / "notify.log")
        raise
    registry.confirm(plan.run, handle.id, handle.status)
    if plan.job.track is not None:
        _follow("sync", plan.run, folder / "tracking.log")
    if plan.job.notify is not None:
        _follow("notify", plan.run, folder / "notify.log")


def _follow(verb: str, run: str, log: Path) -> None:
    """Start a verb that follows a run in the background; it can also be called by hand."""
    argv = [sys.executable, "-P", "-m", "deploykit", verb, run, "--follow"]
    with contextlib.suppress(Exception):  # the job was sent
        shell.detach(argv, log)


# Runs that are sent together share the lock of their array, and their rows are in the registry
# before anything is sent. So an interrupted submit is found again run by run, like that of one run.


class Array(NamedTuple):
    folder: Path
    """The array's own folder, which does not exist yet."""
    name: str
    """The ids of its runs begin with the name and a hyphen."""
    at_once: int
    """The number of its runs that may run at the same time."""


def submit_array(array: Array, plans: Sequence[Plan]) -> None:
    """Send new runs, which differ in their arguments only, as one array.

    Those that were sent before are left out. Raises as `submit`, but does not look at
    budgets; runs that are refused together leave no row, and can be sent otherwise.
    """
    paths.private_folder(array.folder)
    folders = {plan.run: paths.private_folder(paths.run_folder(plan.run)) for plan in plans}
    for folder in folders.values():
        lock = folder / paths.LOCK
        lock.unlink(missing_ok=True)
        lock.symlink_to(array.folder / paths.LOCK)
    with paths.submitting(array.folder, array.name):
        registry.add(*(new_row(plan, folders[plan.run]) for plan in plans))
        rows = registry.lookup(*folders)
        new = [plan for plan in plans if rows[plan.run].id is None]
        if new:
            _send_array(array, new, folders)


def _send_array(array: Array, plans: Sequence[Plan], folders: dict[str, Path]) -> None:
    engine = backend.require(plans[0].backend, "submit_array")
    source, price = source_record(plans[0].bundle), billed(plans[0])
    for plan in plans:
        paths.make_folder(folders[plan.run] / "logs")
        record(plan, folders[plan.run], price, source)
    try:
        handles = engine.submit_array(plans, array.folder, array.name, array.at_once)
    except (Uncertain, TryAgain):
        raise  # the job may exist: `refresh` asks again
    except DeploykitError:
        registry.remove(*(plan.run for plan in plans))
        raise
    registry.confirm_all({handle.run: handle.id for handle in handles})
