"""Submit the same bytes again: the bundle by its hash, the job and its arguments unchanged.

`rerun` sends what a run sent with changes, and with this version's launcher; here nothing may
differ but the run id and where results and checkpoints go, which must not be those of the run.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.bundle import node_plane
from deploykit.job.decode import as_data, read_json
from deploykit.job.model import Plan
from deploykit.lib.errors import NotFound, UsageError
from deploykit.run import facts as run_facts
from deploykit.run import lifecycle, registry, rerun
from deploykit.run.lifecycle import Prepared
from deploykit.run.registry import Run

_LOCATIONS = ("output", "checkpoints")
_MAY_DIFFER = {"source", "backend", *_LOCATIONS}
"""Keys of a job that say where, and not what."""


@dataclass(frozen=True)
class Reproduction:
    """A plan that sends the same bytes, and what of the run it may not use again."""

    prepared: Prepared
    row: Run
    moved: Mapping[str, str]
    """New locations of results and checkpoints, where the job names its own."""

    def submit(self) -> Run:
        """Send it. The commit and the uncommitted changes are recorded as those of the run."""
        new = lifecycle.submit(self.prepared.plan)
        for name in ("source.json", "uncommitted.diff"):
            kept = Path(self.row.folder, name)
            if kept.is_file():
                with contextlib.suppress(OSError):  # only a record
                    shutil.copyfile(kept, Path(new.folder, name))
        return new


@contextlib.contextmanager
def prepare(
    row: Run, run: str | None, backend_name: str | None = None, *, new_launcher: bool = False
) -> Iterator[Reproduction]:
    """The plan of a new run of the same bytes, to be submitted within the context.

    It goes to `backend_name`, by default that of `row`. `new_launcher` accepts another launcher
    than the run had, that of this deploykit, around the same files.

    Raises NotFound where the bundle or the job was not kept, UsageError where anything would
    differ, and what `lifecycle.prepare` raises.
    """
    identity = registry.checked_id(run) if run else registry.new_id(row.name)
    job = run_facts.job_data(Path(row.folder))
    moved = {
        name: f"{job[name].rstrip('/')}/{identity}"
        for name in _LOCATIONS
        if isinstance(job.get(name), str)
    }
    overrides = [f"{name}={json.dumps(location)}" for name, location in moved.items()]
    with rerun.prepare(row, overrides, identity, (), backend_name) as prepared:
        _refuse_other_job(row, job, prepared.plan)
        _refuse_other_bytes(row, prepared.plan, new_launcher=new_launcher)
        bundle = prepared.plan.bundle._replace(commit=row.revision)
        plan = prepared.plan._replace(bundle=bundle)
        yield Reproduction(prepared._replace(plan=plan), row, moved)


def _refuse_other_job(row: Run, job: Mapping[str, Any], plan: Plan) -> None:
    """Raise UsageError where a key of the job would have another value than in the run."""
    new: dict[str, Any] = {**as_data(plan.job), plan.backend: as_data(plan.options)}
    new = json.loads(json.dumps(new))
    others = set(backend.names()) - {plan.backend}
    different = [
        key
        for key, value in job.items()
        if key not in _MAY_DIFFER | others and key in new and new[key] != value
    ]
    if different:
        raise UsageError(
            f"the job would differ from that of {row.run}: {', '.join(different)} would differ",
            hint=f"`deploykit rerun {row.run} --dry-run` shows what would be sent",
        )


def _refuse_other_bytes(row: Run, plan: Plan, *, new_launcher: bool) -> None:
    """Raise where the bundle is not that of the run: UsageError for another launcher."""
    if plan.bundle.hash == row.bundle:
        return
    if not _same_files(plan):
        raise NotFound(
            f"the files that {row.run} sent cannot be bundled again as they were",
            hint=f"`deploykit rerun {row.run}` sends those that can",
        )
    if not new_launcher:
        raise UsageError(
            f"the launcher of this deploykit is not the one that {row.run} sent",
            hint="--new-launcher sends the same files with this one; or use the deploykit of then",
        )


def _same_files(plan: Plan) -> bool:
    """Whether the bundle has the files that were unpacked, each of the same size and mode."""
    try:
        listed = read_json(Path(plan.job.source, node_plane.FILES))
    except (OSError, ValueError):
        return False
    own = f"{node_plane.FOLDER}/"
    then = {path: what for path, what in listed.items() if not path.startswith(own)}
    now = {entry.path: entry.target or [entry.mode, entry.size] for entry in plan.bundle.entries}
    return then == {path: what for path, what in now.items() if not path.startswith(own)}
