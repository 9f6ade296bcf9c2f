"""Remove runs that have ended: which may go, what goes with them, and what stays elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.job.model import Handle, Problem, State
from deploykit.lib import paths, shell
from deploykit.lib.errors import UsageError
from deploykit.lib.paths import submitting
from deploykit.run import registry, storage, sweep_folders
from deploykit.run import state as run_state
from deploykit.run.registry import Run


def refuse_unfinished(
    rows: Sequence[Run], sweeps: Collection[str] = (), *, force: bool = False
) -> None:
    """Raise UsageError with each run that has not ended or that a sweep needs, and what to do.

    `sweeps` are removed too. `force` allows runs whose state cannot be known, since their target is
    gone.
    """
    needed = {run: sweep for run, sweep in needed_by_sweeps(rows).items() if sweep not in sweeps}
    problems = [
        Problem("", f"{row.run} is {row.state}", _how_to_end(row))
        for row in run_state.refresh(rows)
        if not (removable(row) or (force and _is_out_of_reach(row)))
    ]
    problems += [
        Problem("", f"{run} is a trial of the sweep {sweep}, which has not ended", _of_sweep(sweep))
        for run, sweep in needed.items()
    ]
    if problems:
        raise UsageError("only runs that have ended can be removed", problems=problems)


def needed_by_sweeps(rows: Iterable[Run]) -> dict[str, str]:
    """The runs whose sweeps have not ended, each with its sweep.

    The controller may not have recorded them yet: without their rows it would start them again.
    """
    sweeps = sweep_folders.unfinished()
    pairs = ((row.run, sweep_folders.of_run(row.run, sweeps)) for row in rows)
    return {run: sweep for run, sweep in pairs if sweep is not None}


def _of_sweep(sweep: str) -> str:
    resume = shell.command("deploykit", "sweep", "resume", sweep)
    return f"`{resume}` continues it; `{shell.command('deploykit', 'rm', sweep)}` removes it whole"


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
    locations: list[tuple[str, str | None]] = []
    with contextlib.suppress(UsageError):  # its backend is no longer installed
        engine = backend.find(row.backend)
        if backend.offers(engine, "remains"):
            job = Handle(row.backend, row.target, row.id or "", row.run, row.folder)
            locations += engine.remains(job, row.output)
    output = Path(row.output)
    if output.is_absolute() and Path(row.folder) not in output.parents:
        locations.append((row.output, None))
    return locations


def removable(row: Run) -> bool:
    """Whether a run has ended, and no job of it can still appear."""
    return State(row.state).final and not registry.may_still_come(row)


def _is_out_of_reach(row: Run) -> bool:
    return row.state == State.UNKNOWN.value or row.reason.startswith(run_state.LAST_KNOWN)


def _how_to_end(row: Run) -> str:
    if _is_out_of_reach(row):
        return f"{row.reason}; if its job is gone for good, add --force"
    if State(row.state).final:
        return f"its job may still appear; try again in {registry.IN_FLIGHT // 60} minutes"
    return f"`deploykit cancel {row.run}` stops it, `deploykit wait {row.run}` waits for its end"
