"""Remove ended runs: their folders on this machine, and bundles that no other run uses.

Results and checkpoints in the run's folder are removed too. Files elsewhere are kept and listed,
with the command that removes them. The whole id of a sweep removes the sweep and all its runs.

deploykit rm exp-1 exp-2
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


def run(args: argparse.Namespace) -> int:
    sweeps = _sweeps(args.run)
    rows = _named([name for name in args.run if name not in sweeps])
    rows |= {row.run: row for sweep in sweeps.values() for row in folder.runs_of(sweep)}
    storage.refuse_unfinished(run_state.refresh(list(rows.values())), sweeps, force=args.force)
    with contextlib.ExitStack() as held:
        for sweep in sweeps.values():
            held.enter_context(folder.controlling(sweep))
        removed = _remove(list(rows.values()), as_json=args.json)
        for sweep in sweeps.values():
            storage.remove(sweep.folder)
            removed.append({"sweep": sweep.id})
            if not args.json:
                output.say(f"{sweep.id}: sweep removed")
    if args.json:
        output.emit(removed)
    return 0


def _remove(rows: Sequence[Run], *, as_json: bool) -> list[dict[str, Any]]:
    """Remove each run, and say what is left elsewhere."""
    removed: list[dict[str, Any]] = []
    for row in rows:
        used, left = storage.run_usage(row.run), storage.left_elsewhere(row)
        storage.remove_run(row)
        size = used.size if used else 0
        remains = [{"location": location, "command": command} for location, command in left]
        removed.append({"run": row.run, "bytes": size, "left": remains})
        if not as_json:
            output.say(f"{row.run}: removed, {units.size(size)}", *map(_left, left))
    return removed


def _left(remaining: tuple[str, str | None]) -> str:
    location, command = remaining
    return f"  left    {location}: {command or 'named in the job file, so other runs may use it'}"


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
