"""Submit the job of a run again, from the bundle that it sent: with changes, or exactly.

`submit` writes the job, with all overrides and arguments, into the run folder as ``job.json``,
which is a job file like any other. `prepare` sends it with changes, and with this version's
launcher. `reproduce` sends the same bytes: nothing may differ but the run id and where results and
checkpoints go, which must not be those of the earlier run.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.backends import base
from deploykit.bundle import archive as bundle
from deploykit.bundle import node_plane
from deploykit.job import environments
from deploykit.job import file as jobfile
from deploykit.job.decode import read_json
from deploykit.job.file import Overrides
from deploykit.job.model import Plan, State
from deploykit.job.spelling import UNKNOWN_KEY
from deploykit.lib import paths
from deploykit.lib.errors import JobFileError, NotFound, UsageError
from deploykit.lib.problem import Problem
from deploykit.lib.version import __version__
from deploykit.run import lifecycle, registry
from deploykit.run.lifecycle import Prepared
from deploykit.run.registry import Run

UPGRADE = "upgrade with `pip install -U deploykit`, or use the version that created it"
_PYLOCK = "exit_records/pylock.toml"
"""In a run folder: the versions that the nodes have chosen, or are to take."""
_LOCATIONS = ("output", "checkpoints")
_MAY_DIFFER = {"source", "backend", *_LOCATIONS}
"""Keys of a job that say where, and not what."""


@contextlib.contextmanager
def prepare(  # noqa: PLR0913, PLR0917 - as submit
    row: Run,
    overrides: Overrides,
    run: str | None,
    arguments: Sequence[str],
    backend: str | None = None,
    files: Mapping[str, Path] | None = None,
) -> Iterator[Prepared]:
    """The plan of a new run like `row`, with `overrides`, and `arguments` after its own.

    It goes to `backend`, by default that of `row`, and can be submitted within the context, while
    its source is unpacked, with further `files` by their path in it. Raises NotFound if the job or
    the source of the run was not kept, and what `lifecycle.prepare` raises.
    """
    job = Path(row.folder, base.JOB)
    if not job.is_file():
        raise NotFound(
            f"{row.run} has no record of its job: {job} does not exist",
            hint="submit the job file again; attached runs have no record of their job",
        )
    archive = kept_source(row)
    with paths.scratch(paths.private_folder(paths.bundles())) as scratch:
        source = scratch / "source"
        bundle.unpack(archive, source)
        for path, file in (files or {}).items():
            shutil.copyfile(file, source / path)
        chosen = [*overrides, f"source={json.dumps(str(source))}"]
        try:
            # as data, whose locations are absolute: one of `overrides` starts where the user is
            data, _ = jobfile.parse(job)
            prepared = lifecycle.prepare(data, chosen, backend or row.backend, run, arguments)
        except JobFileError as error:
            if _is_newer(job, error.problems):
                what = f"{row.run} was created by a newer deploykit than this one ({__version__})"
                raise JobFileError(what, error.problems, hint=UPGRADE) from error
            raise
        yield prepared


_NOT_DONE = {State.FAILED, State.CANCELLED}


def only_failed(row: Run, backend: str | None) -> list[str]:
    """Overrides with which a rerun starts only the tasks that failed or were cancelled.

    Empty for a run that is not an array, and has failed. Raises UsageError if nothing has failed,
    or if the tasks are to run on another `backend`.
    """
    hint = "without --failed, the whole run is submitted again"
    engine = base.find(row.backend)
    if row.handle is not None and base.offers(engine, "task_status"):
        statuses = engine.task_status(row.handle)
        failed = [number for number, status in statuses.items() if status.state in _NOT_DONE]
        if failed and backend not in {None, row.backend}:
            raise UsageError(f"the tasks of {row.run} can run only on {row.backend}")
        if failed:
            chosen = engine.choose_tasks(failed)
            return [f"{row.backend}.{key}={value}" for key, value in chosen.items()]
        if statuses:
            raise UsageError(f"{row.run}: no task has failed", hint=hint)
    if State(row.state) not in _NOT_DONE:
        raise UsageError(f"{row.run} has not failed (state: {row.state})", hint=hint)
    return []


def kept_source(row: Run) -> Path:
    """The archive of the source that a run sent. Raises NotFound if it was not kept."""
    archive = bundle.kept(row.bundle)
    if archive is None:
        raise NotFound(
            f"the source of {row.run} is no longer in {paths.bundles()}",
            hint="submit the job file again, with the current source",
        )
    return archive


def _is_newer(job: Path, problems: Sequence[Problem]) -> bool:
    """Whether the file, which a deploykit wrote, has keys that are unknown to this version."""

    def has(data: object, keys: Sequence[str]) -> bool:
        for key in keys:
            if not isinstance(data, dict) or key not in data:
                return False
            data = data[key]
        return True

    return any(
        problem.message == UNKNOWN_KEY and has(read_json(job), problem.path.split("."))
        for problem in problems
    )


@dataclass(frozen=True)
class Reproduction:
    """A plan that sends the same bytes, and what of the run it may not use again."""

    prepared: Prepared
    row: Run
    moved: Mapping[str, str]
    """New locations of results and checkpoints, if the job names its own."""

    def submit(self) -> Run:
        """Send it. The commit and the uncommitted changes are recorded as those of the run."""
        self._keep_versions()
        new = lifecycle.submit(self.prepared.plan)
        for name in ("source.json", "uncommitted.diff"):
            kept = Path(self.row.folder, name)
            if kept.is_file():
                with contextlib.suppress(OSError):  # only a record
                    shutil.copyfile(kept, Path(new.folder, name))
        return new

    @property
    def unlocked(self) -> str | None:
        """The script whose dependencies may get other versions than in the run."""
        installed = environments.on_nodes(self.prepared.plan.job) or {}
        script = installed.get("script")
        if script is None or Path(self.prepared.plan.job.source, f"{script}.lock").is_file():
            return None
        sees_folder = base.offers(base.find(self.prepared.plan.backend), "check_function")
        return None if sees_folder and self._versions.is_file() else str(script)

    @property
    def _versions(self) -> Path:
        return Path(self.row.folder, _PYLOCK)

    def _keep_versions(self) -> None:
        """Give the nodes the versions that those of the run have chosen, if it had no lock."""
        if self._versions.is_file():
            folder = paths.private_folder(paths.run_folder(self.prepared.plan.run))
            paths.private_folder(folder / "exit_records")
            shutil.copyfile(self._versions, folder / _PYLOCK)


@contextlib.contextmanager
def reproduce(
    row: Run, run: str | None, backend: str | None = None, *, new_launcher: bool = False
) -> Iterator[Reproduction]:
    """The plan of a new run of the same bytes, to be submitted within the context.

    It goes to `backend`, by default that of `row`. `new_launcher` accepts another launcher than
    the run had, that of this deploykit, around the same files.

    Raises NotFound if the bundle or the job was not kept, UsageError if anything would differ, and
    what `lifecycle.prepare` raises.
    """
    identity = registry.checked_id(run) if run else registry.new_id(row.name)
    job = row.job_data()
    moved = {
        name: f"{job[name].rstrip('/')}/{identity}"
        for name in _LOCATIONS
        if isinstance(job.get(name), str)
    }
    overrides = [f"{name}={json.dumps(location)}" for name, location in moved.items()]
    with prepare(row, overrides, identity, (), backend) as prepared:
        plan = prepared.plan
        _refuse_other_job(row, job, plan)
        _refuse_other_bytes(row, plan, new_launcher=new_launcher)
        plan = plan._replace(bundle=plan.bundle._replace(commit=row.revision))
        yield Reproduction(prepared._replace(plan=plan), row, moved)


def _refuse_other_job(row: Run, job: Mapping[str, Any], plan: Plan) -> None:
    """Raise UsageError if a key of the job would have another value than in the run."""
    new = lifecycle.job_data(plan)
    free = _MAY_DIFFER | (set(base.names()) - {plan.backend})
    different = [
        key for key, value in job.items() if key not in free and key in new and new[key] != value
    ]
    if different:
        raise UsageError(
            f"the job would differ from that of {row.run} in {', '.join(different)}",
            hint=f"`deploykit rerun {row.run} --dry-run` shows what would be sent",
        )


def _refuse_other_bytes(row: Run, plan: Plan, *, new_launcher: bool) -> None:
    """Raise if the bundle is not that of the run: UsageError for another launcher."""
    if plan.bundle.hash == row.bundle:
        return
    if not _has_same_files(plan):
        raise NotFound(
            f"the files of {row.run} can no longer be bundled exactly as they were sent",
            hint=f"`deploykit rerun {row.run}` sends the files that remain",
        )
    if not new_launcher:
        raise UsageError(
            f"this version's launcher differs from the one that {row.run} sent",
            hint="use this version's launcher with --new-launcher, or run the old version of "
            "deploykit",
        )


def _has_same_files(plan: Plan) -> bool:
    """Whether the bundle has the files that were unpacked, each of the same size and mode."""
    try:
        listed = read_json(Path(plan.job.source, node_plane.FILES))
    except (OSError, ValueError):
        return False
    own = f"{node_plane.FOLDER}/"
    then = {path: what for path, what in listed.items() if not path.startswith(own)}
    now = {entry.path: entry.target or [entry.mode, entry.size] for entry in plan.bundle.entries}
    return then == {path: what for path, what in now.items() if not path.startswith(own)}
