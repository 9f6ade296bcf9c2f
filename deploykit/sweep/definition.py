"""Define a new sweep: its file and its job checked together, and its source kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from deploykit.bundle import archive as bundle
from deploykit.job import checks
from deploykit.job.decode import as_data
from deploykit.job.file import JobFile
from deploykit.job.model import Problem
from deploykit.lib.errors import JobFileError
from deploykit.run import lifecycle, registry
from deploykit.sweep import folder, space, spending, trial_job
from deploykit.sweep.file import SweepFile
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.model import Sweep
from deploykit.sweep.trial_job import Base


class Request(NamedTuple):
    """What the command line adds to a sweep file."""

    overrides: tuple[str, ...] = ()
    """For the job."""
    backend: str | None = None
    id: str | None = None


class Defined(NamedTuple):
    """A sweep that can be started."""

    record: SweepRecord
    base: Base
    warnings: list[Problem]


def define(file: SweepFile, request: Request) -> Defined:
    """The sweep of a file, which is not kept yet; its source is packed as it is read.

    Raises NotFound, UsageError, or JobFileError with every problem of the job, or else of both.
    """
    source = _job(file)
    prepared = lifecycle.prepare(source, request.overrides, request.backend, None, pack=True)
    base = trial_job.base(prepared.plan)
    problems = [*spending.problems(file.sweep, base), *_problems_of_trials(file.sweep, base)]
    if any(problem.severity == "error" for problem in problems):
        raise JobFileError(str(file.source), problems)
    record = SweepRecord(
        _id(file.sweep, base, request.id),
        file.sweep,
        base.backend,
        {**as_data(base.job), base.backend: as_data(base.options)},
        str(source.absolute()),
        request.overrides,
        base.bundle.hash,
        registry.now(),
    )
    return Defined(record, base, [*prepared.warnings, *problems])


def keep(defined: Defined) -> None:
    """Keep a new sweep and its source, so that it can be started, and resumed anywhere."""
    bundle.store(defined.base.bundle)
    folder.create(defined.record)


def _id(sweep: Sweep, base: Base, chosen: str | None) -> str:
    return folder.checked_id(chosen) if chosen else folder.new_id(sweep.name or base.job.name)


def _job(file: SweepFile) -> Path:
    """The job file, as messages name it."""
    own = Path(file.sweep.job)
    return own if file.folder == Path.cwd() else file.folder / own


def _problems_of_trials(sweep: Sweep, base: Base) -> Iterator[Problem]:
    """What is wrong with the job of a trial, and not with the job alone."""
    values = space.choose(sweep.parameters, lambda _, one: space.at(one, 0.5))
    passed = space.passed(sweep.parameters, values)
    entry = replace(base.job.entrypoint, args=(*base.job.entrypoint.args, *passed.arguments))
    job = replace(base.job, entrypoint=entry, env={**base.job.env, **passed.env})
    file = JobFile(base.job.__dict__, job, {base.backend: base.options}, {}, {})
    before = set(map(str, lifecycle.problems(file._replace(job=base.job), base.backend)))
    for problem in (*checks.check_variables(job), *lifecycle.problems(file, base.backend)):
        if str(problem) not in before:
            yield problem
