"""Runs that are sent together as one job array.

Before anything is sent, their rows are in the registry, and each run folder names its array. All
share the lock of the array. So an interrupted submit is found again run by run, like that of a
single run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from deploykit.backends import base as backend
from deploykit.job.model import Handle, Plan
from deploykit.lib import paths
from deploykit.lib.errors import DeploykitError, TryAgain, Uncertain
from deploykit.run import lifecycle, registry


class Array(NamedTuple):
    """A job array to submit."""

    folder: Path
    """The array's own folder, which does not exist yet."""
    name: str
    """The ids of its runs begin with the name and a hyphen."""
    at_once: int
    """The number of its runs that may run at the same time."""


def submit(array: Array, plans: Sequence[Plan]) -> None:
    """Send new runs, which differ in their arguments only, as one array.

    Those that were sent before are left out. Raises as `lifecycle.submit`, but does not look at
    budgets; runs that are refused together leave no row, and can be sent otherwise.
    """
    paths.private_folder(array.folder)
    folders = {plan.run: _folder(plan, array.folder) for plan in plans}
    with paths.submitting(array.folder, array.name):
        registry.add(*(lifecycle.new_row(plan, folders[plan.run]) for plan in plans))
        rows = registry.lookup(*folders)
        new = [plan for plan in plans if rows[plan.run].id is None]
        if new:
            _send(array, new, folders)


def _folder(plan: Plan, array: Path) -> Path:
    """Make the folder of a run, whose lock is that of its array."""
    folder = paths.private_folder(paths.run_folder(plan.run))
    lock = folder / paths.LOCK
    lock.unlink(missing_ok=True)
    lock.symlink_to(array / paths.LOCK)
    return folder


def _send(array: Array, plans: Sequence[Plan], folders: dict[str, Path]) -> None:
    engine = backend.require(plans[0].backend, "submit_array")
    source, price = lifecycle.source_record(plans[0].bundle), lifecycle.billed(plans[0])
    for plan in plans:
        paths.make_folder(folders[plan.run] / "logs")
        lifecycle.record(plan, folders[plan.run], price, source)
    try:
        handles = engine.submit_array(plans, array.folder, array.name, array.at_once)
    except (Uncertain, TryAgain):
        raise  # the job may exist: `refresh` asks again
    except DeploykitError:
        registry.remove(*(plan.run for plan in plans))
        raise
    registry.confirm_all({handle.run: handle.id for handle in handles})


def cancel(rows: Sequence[registry.Run]) -> None:
    """Stop unfinished runs, those of one backend together if it can.

    Raises the first error, once all were tried.
    """
    errors: list[DeploykitError] = []
    handles: dict[str, list[Handle]] = defaultdict(list)
    for row in rows:
        if row.handle is not None:
            handles[row.backend].append(row.handle)
    for name, group in handles.items():
        engine = backend.find(name)
        steps = [partial(engine.cancel, handle) for handle in group]
        if backend.offers(engine, "submit_array"):
            steps = [partial(engine.cancel_all, group)]
        for step in steps:
            try:
                step()
            except DeploykitError as error:
                errors.append(error)
    if errors:
        raise errors[0]
