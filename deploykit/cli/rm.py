"""Remove finished runs: their folders on this machine, and bundles that no other run uses.

Results and checkpoints in the run's folder are removed too. Files elsewhere are kept, and listed
with the command that removes them. `--remote` also removes the run's results in S3 and its folder
on a login node, unless another run uses them. Given the full id of a sweep, removes the sweep and
all its runs.

deploykit rm exp-1 exp-2
deploykit rm exp-1 --remote
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

from deploykit.cli import output
from deploykit.lib import units
from deploykit.lib.errors import NotFound, UsageError
from deploykit.lib.problem import Problem
from deploykit.run import registry, storage
from deploykit.run import state as run_state
from deploykit.run.registry import Run
from deploykit.sweep import folder
from deploykit.sweep.folder import SweepRecord

SHARED = ("exact_runs",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force",
        action="store_true",
        help="also remove runs whose state is unknown because their target is gone",
    )
    parser.add_argument(
        "--remote",
        action="store_true",
        help="also delete the run's own files in S3 or on the login node; asks for confirmation",
    )
    parser.add_argument("--yes", action="store_true", help="delete remote files without asking")


def run(args: argparse.Namespace) -> int:
    sweeps = _sweeps(args.run)
    rows = _named([name for name in args.run if name not in sweeps])
    rows |= {row.run: row for sweep in sweeps.values() for row in folder.runs_of(sweep)}
    storage.refuse_unfinished(run_state.refresh(list(rows.values())), sweeps, force=args.force)
    if args.remote:
        _remove_elsewhere(list(rows.values()), args)
    with contextlib.ExitStack() as held:
        for sweep in sweeps.values():
            held.enter_context(folder.controlling(sweep))
        removed = _remove(list(rows.values()), args)
        for sweep in sweeps.values():
            storage.remove(sweep.folder)
            removed.append({"sweep": sweep.id})
            if not args.json:
                output.say(f"{sweep.id}: sweep removed")
    if args.json:
        output.emit(removed)
    return 0


def _remove_elsewhere(rows: Sequence[Run], args: argparse.Namespace) -> None:
    """List what only these runs use elsewhere, and delete it once that is confirmed."""
    locations = [
        location
        for row in rows
        for location, command in storage.left_elsewhere(row)
        if command is not None
    ]
    if not locations:
        return
    output.note("to be deleted:", *(f"  {location}" for location in locations))
    if not args.yes:
        if args.json or not output.can_ask():
            raise UsageError(
                "cannot ask for confirmation without a terminal",
                hint="--yes deletes the files listed above; nothing was removed",
            )
        if output.ask("Delete them?", ("no", "yes")) == "no":
            raise UsageError("nothing was removed")
    for row in rows:
        storage.remove_elsewhere(row)


def _remove(rows: Sequence[Run], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Remove each run, and say what is left elsewhere."""
    removed: list[dict[str, Any]] = []
    for row in rows:
        used, left = storage.run_usage(row.run), storage.left_elsewhere(row)
        storage.remove_run(row)
        size = used.size if used else 0
        if args.remote:
            left = [(location, command) for location, command in left if command is None]
        remains = [{"location": location, "command": command} for location, command in left]
        removed.append({"run": row.run, "bytes": size, "left": remains})
        if not args.json:
            output.say(f"{row.run}: removed, {units.size(size)}", *map(_left, left))
    return removed


def _left(remaining: tuple[str, str | None]) -> str:
    location, command = remaining
    return f"  left    {location}: {command or 'set in the job file, so other runs may use it'}"


def _sweeps(names: Sequence[str]) -> dict[str, SweepRecord]:
    """The sweeps with exactly these ids; a run with the same id comes first."""
    chosen = set(names) - set(registry.lookup(*names))
    return {one.id: one for one in folder.every() if one.id in chosen}


def _named(names: list[str]) -> dict[str, Run]:
    """The runs of these names. Raises UsageError with every name that is none."""
    rows, problems = {}, []
    for name in names:
        try:
            row = registry.get_to_stop(name)
            rows[row.run] = row
        except NotFound as error:
            problems.append(Problem("", str(error), error.hint))
    if len(problems) == 1 and not rows:
        raise NotFound(problems[0].message, hint=problems[0].hint)
    if problems:
        raise UsageError("nothing was removed", problems=problems)
    return rows
