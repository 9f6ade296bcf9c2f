"""Remove runs that have ended: which may go, what goes with them, and what stays elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from deploykit import backend, lifecycle, paths, registry, storage
from deploykit.capabilities import Remains
from deploykit.errors import UsageError
from deploykit.model import Handle, Problem, State
from deploykit.registry import Run
from deploykit.run_record import submitting


def refuse_unfinished(rows: Sequence[Run], *, force: bool = False) -> None:
    """Raise UsageError with each run that has not ended, and how to end it.

    `force` allows those whose state cannot be known, since their target is gone.
    """
    problems = [
        Problem("", f"{row.run} is {row.state}", _how_to_end(row))
        for row in lifecycle.refresh(rows)
        if not (removable(row) or (force and _is_out_of_reach(row)))
    ]
    if problems:
        raise UsageError("only runs that have ended can be removed", problems=problems)


def remove(row: Run) -> None:
    """Remove a run from this machine. Raises CannotWrite where that fails.

    Raises TryAgain while it is being submitted.
    """
    folder = storage.folder_of(row.run)
    locked = folder is not None and paths.is_private_folder(folder)  # not a link in its place
    with submitting(folder, row.run) if folder and locked else contextlib.nullcontext():
        storage.remove_run(row)


def left_elsewhere(row: Run) -> list[tuple[str, str | None]]:
    """Locations outside the run folder with files of the run, and the command that removes each.

    None where other runs may use the location too.
    """
    found: list[tuple[str, str | None]] = []
    with contextlib.suppress(UsageError):  # its backend is no longer installed
        engine = backend.find(row.backend)
        if isinstance(engine, Remains):
            job = Handle(row.backend, row.target, row.id or "", row.run, row.folder)
            found += engine.remains(job, row.output)
    output = Path(row.output)
    if output.is_absolute() and Path(row.folder) not in output.parents:
        found.append((row.output, None))
    return found


def removable(row: Run) -> bool:
    """Whether a run has ended, and no job of it can still appear."""
    return State(row.state).final and not registry.may_still_come(row)


def _is_out_of_reach(row: Run) -> bool:
    return row.state == State.UNKNOWN.value or row.reason.startswith(lifecycle.LAST_KNOWN)


def _how_to_end(row: Run) -> str:
    if _is_out_of_reach(row):
        return f"{row.reason}; if its job is gone for good, add --force"
    if State(row.state).final:
        return f"its job may still appear; try again in {registry.IN_FLIGHT // 60} minutes"
    return f"`deploykit cancel {row.run}` stops it, `deploykit wait {row.run}` waits for its end"
