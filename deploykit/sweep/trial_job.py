"""The job of a trial: that of the sweep with the trial's arguments, under the trial's run id."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.backends import base as backend
from deploykit.bundle import archive as bundle
from deploykit.job.model import Bundle, JobSpec, Plan
from deploykit.lib import paths
from deploykit.lib.errors import DeploykitError, JobFileError, NotFound
from deploykit.run import lifecycle
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.space import Passed


class Base(NamedTuple):
    """The job of a sweep, before its parameters."""

    backend: str
    job: JobSpec
    options: Any
    bundle: Bundle


def base(plan: Plan) -> Base:
    """The job of a plan."""
    return Base(plan.backend, plan.job, plan.options, plan.bundle)


@contextlib.contextmanager
def of(record: SweepRecord) -> Iterator[Base]:
    """The job of a sweep with the source of its start; valid within the context.

    Raises NotFound where that source is no longer kept.
    """
    with contextlib.suppress(JobFileError):  # the folder may have changed, or be gone
        prepared = _prepared(record, {})
        if prepared.bundle.hash == record.bundle:
            yield prepared
            return
    archive = bundle.kept(record.bundle)
    if archive is None:
        raise NotFound(
            f"the source of the sweep {record.id} is no longer in {paths.bundles()}",
            hint="start a new sweep",
        )
    with tempfile.TemporaryDirectory(dir=paths.private_folder(paths.bundles())) as scratch:
        bundle.unpack(archive, Path(scratch, "source"))
        yield _prepared(record, {"source": str(Path(scratch, "source"))})


def _prepared(record: SweepRecord, keys: Mapping[str, str]) -> Base:
    job = {**record.job, **keys}
    return base(lifecycle.prepare(job, (), record.backend, record.id).plan)


def slots(base: Base) -> Sequence[Mapping[str, str]]:
    """Variables of each slot of the machine; none where slots do not differ."""
    engine = backend.find(base.backend)
    return engine.slots(base.job, base.options) if backend.offers(engine, "slots") else ()


def largest_array(base: Base) -> int:
    """Most runs of the job in one job array; 0: none."""
    engine = backend.find(base.backend)
    if base.job.budget is not None or not backend.offers(engine, "submit_array"):
        return 0
    try:
        return engine.largest_array(base.options)
    except DeploykitError:  # `submit` tells why
        return 0


def plan(base: Base, run: str, passed: Passed, first: str) -> Plan:
    """The plan of the run `run` of a trial, whose first attempt had the run id `first`."""
    entry = base.job.entrypoint
    job = replace(
        base.job,
        entrypoint=replace(entry, args=(*entry.args, *passed.arguments)),
        env={**base.job.env, **passed.env},
        output=_below(base.job.output, run),
        checkpoints=_below(base.job.checkpoints, first) or _checkpoints(base, run, first),
    )
    engine = backend.find(base.backend)
    return engine.plan(job, base.options, run=run, bundle=base.bundle)


def _below(location: str | None, name: str) -> str | None:
    """A part of a location that is this trial's own: trials must not resume from each other."""
    return None if location is None else f"{location.rstrip('/')}/{name}"


def _checkpoints(base: Base, run: str, first: str) -> str | None:
    """Where a later attempt finds the checkpoints of the first, if its nodes see that folder."""
    if run == first or not _sees_run_folders(base):
        return None
    return str(paths.run_folder(first) / "checkpoints")


def resumes(base: Base) -> bool:
    """Whether a later attempt of a trial finds the checkpoints of the first."""
    return base.job.checkpoints is not None or _sees_run_folders(base)


def _sees_run_folders(base: Base) -> bool:
    engine = backend.find(base.backend)
    return backend.offers(engine, "check_function") and not any(engine.check_function(base.options))
