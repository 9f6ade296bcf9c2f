"""Runs that were submitted: their state now, until they end, and how to stop them."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.backends.base import Backend
from deploykit.job.model import NO_JOB, Handle, State, Status
from deploykit.lib import paths
from deploykit.lib.deadline import within
from deploykit.lib.errors import DeploykitError, JobMissing, NeverStarts, NotFound, TryAgain
from deploykit.run import excluded_nodes, registry, storage
from deploykit.run.registry import Run, Search

_BLOCKED = 10.0
"""Seconds after which `wait` gives up on a run that can never start: reasons change at first."""
_MISSING = 300.0
"""Seconds after which `wait` gives up on a run without a job at its target: it may be new."""
PATIENCE = 5.0
"""Seconds that a person waits for a backend's answer before the last known states are shown."""
_POLL = (0.2, 15.0)
"""Shortest and longest interval between two status queries, in seconds."""


def refresh(rows: Sequence[Run], patience: float | None = None) -> list[Run]:
    """The same runs with their current status: one query to each backend.

    If a backend cannot be reached, or takes longer than `patience` seconds, its runs keep their
    last known state, and the reason says so.
    """
    unfinished: dict[str, list[Run]] = defaultdict(list)
    for row in rows:
        if not State(row.state).final or registry.may_still_come(row):
            unfinished[row.backend].append(row)
    failures: dict[str, str] = {}
    for name, group in unfinished.items():
        try:
            ask = partial(_query, backend.find(name), group)
            changed, failed = ask() if patience is None else within(patience, ask)
            registry.update_all(changed)
            failures |= failed
        except TimeoutError:
            reason = f"{registry.LAST_KNOWN} {name} did not answer within {patience:g} s"
            failures |= {row.run: reason for row in group}
        except (DeploykitError, OSError) as error:
            failures |= {row.run: _last_known(name, error) for row in group}
    current = registry.lookup(*(row.run for row in rows))
    queried = (row.run for group in unfinished.values() for row in group)
    ended = [current[run] for run in queried if run in current and State(current[run].state).final]
    if ended:
        excluded_nodes.learn(ended)
        storage.tidy()
    # another process may have removed a run that has ended
    return [_with_reason(current.get(row.run, row), failures.get(row.run)) for row in rows]


def search(wanted: Search, limit: int | None, patience: float | None = None) -> list[Run]:
    """The newest runs that match, with their current state; `patience` as in `refresh`.

    With states to match, it asks for all unfinished runs first, since they may be in one by now.
    """
    known = replace(wanted, states=())
    if not wanted.states:
        return refresh(registry.select(*known.sql, limit=limit), patience)
    condition, values = known.sql
    unfinished = registry.select(f"{registry.UNFINISHED} AND {condition}", values)
    current = {row.run: row for row in refresh(unfinished, patience)}
    return [current.get(row.run, row) for row in registry.select(*wanted.sql, limit=limit)]


def _last_known(name: str, error: Exception) -> str:
    return f"{registry.LAST_KNOWN} {name} cannot be reached: {error}"


def _with_reason(row: Run, reason: str | None) -> Run:
    """The row with the reason of a failed query, and a note if its run folder was deleted."""
    parts = [row.reason if reason is None else reason]
    if not Path(row.folder).exists() and row.folder not in parts[0]:
        parts.append(f"the run folder {row.folder} was deleted")
    return row._replace(reason="; ".join(filter(None, parts)))


def _query(engine: Backend, rows: list[Run]) -> tuple[dict[str, Status], dict[str, str]]:
    """The changed states of one backend's runs, and the reasons of those that failed, by run.

    It does not record them: an abandoned query, whose programs were killed, finds only errors.
    """
    failures = {}
    for row in rows:
        if row.id is None:
            try:
                with contextlib.suppress(TryAgain), paths.submitting(Path(row.folder), row.run):
                    reconcile(engine, row)
            except DeploykitError as error:
                failures[row.run] = _last_known(row.backend, error)
    current = registry.lookup(*(row.run for row in rows)).values()
    by_handle = {row.handle: row for row in current if row.handle is not None}
    status = engine.status(list(by_handle)) if by_handle else {}
    changed = {row.run: status[at] for at, row in by_handle.items() if status[at] != row.status}
    return changed, failures


def reconcile(engine: Backend, row: Run) -> None:
    """Find the job of an interrupted submit, and record if it exists."""
    handle = engine.find(row.run, Path(row.folder), row.target)
    if handle is not None:
        registry.confirm(row.run, handle.id)
        return
    if row.state != State.UNSENT.value:  # else it keeps its reason
        absent = f"{row.backend} has no job for this run"
        reason = f"the submit was interrupted, and {absent}; submit it again"
        registry.update(row.run, Status(State.UNSENT, "", reason))


def wait_all(names: Sequence[str], timeout: float | None = None) -> Iterator[list[Run]]:
    """The runs, each time one has changed, until all have ended or stay stuck, or `timeout` s.

    A run is stuck if it can never start, or the target has no job of it.
    """
    end, leave = time.monotonic() + (math.inf if timeout is None else timeout), math.inf
    pause, longest = _POLL
    last: list[Run] = []
    while True:
        known = registry.lookup(*names)
        rows = refresh([known.get(name) or registry.known(name) for name in names])
        if rows != last:
            yield rows
            last, pause = rows, _POLL[0]
        now = time.monotonic()
        patience = max((_patience(row) for row in rows), default=0.0)
        leave = min(leave, now + patience) if patience < math.inf else math.inf
        if now >= min(end, leave):
            return
        time.sleep(pause)
        pause = min(pause * 1.3, longest)


def _patience(row: Run) -> float:
    """Seconds that it is worth waiting while a run stays as it is."""
    if State(row.state).final:
        return 0.0
    if row.state == State.BLOCKED.value:
        return _BLOCKED
    return _MISSING if is_missing(row) else math.inf


def is_missing(row: Run) -> bool:
    """Return whether the target answered that it has no job of the run."""
    return (row.state, row.native) == (State.UNKNOWN.value, NO_JOB)


def cancel(row: Run) -> Run:
    """Stop a run, unless it has ended. Raises NotFound if no job was sent."""
    row = refresh([row])[0]
    if row.handle is None:
        raise NotFound(f"{row.run} was never sent", hint=row.reason or None)
    if not State(row.state).final:
        backend.find(row.backend).cancel(row.handle)
        row = refresh([row])[0]
    return row


def cancel_all(rows: Sequence[Run]) -> None:
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


def attach(run: str, name: str, target: str | None) -> Run:
    """The run, which another machine may have submitted to the backend `name`.

    Raises UsageError if the backend does not offer this, NotFound if there is no such run.
    """
    engine = backend.require(name, "attach")
    if not registry.lookup(run):
        folder = paths.run_folder(registry.checked_id(run))
        handle = engine.attach(run, folder, target)
        paths.private_folder(folder)
        row = Run(
            run=run,
            name=run,
            backend=name,
            target=handle.target,
            folder=str(folder),
            plan="",
            bundle="",
            revision=None,
            created=registry.now(),
            output="",
        )
        registry.add(row)
        registry.confirm(run, handle.id)
    return refresh([registry.known(run)])[0]


def exit_code(row: Run) -> int:
    """The exit code of `wait`: the trainer's, or one for how the run ended; 1 if it is unknown."""
    if row.state == State.SUCCEEDED.value:
        return 0
    if row.state == State.BLOCKED.value:
        return NeverStarts.exit_code
    if is_missing(row):
        return JobMissing.exit_code
    if row.state == State.CANCELLED.value:
        return 143
    return row.exit_code or 1
