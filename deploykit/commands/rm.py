"""Remove runs that have ended: their folders on this machine, and bundles that no other run uses.

Results and checkpoints in the run's folder go with it. What a job left elsewhere stays, and is
named with the command that removes it.

deploykit rm exp-1 exp-2
"""

from __future__ import annotations

import argparse

from deploykit import registry, removal, storage
from deploykit.bundle import readable
from deploykit.commands import output
from deploykit.errors import NotFound, UsageError
from deploykit.problem import Problem
from deploykit.registry import Run

SHARED = ("runs",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --force."""
    parser.add_argument(
        "--force",
        action="store_true",
        help="also a run whose target is gone, so that its state is unknown",
    )


def run(args: argparse.Namespace) -> int:
    """Remove each run, once all may be removed, and say what is left elsewhere."""
    rows = _named(args.run)
    removal.refuse_unfinished(rows, force=args.force)
    removed = []
    for row in rows:
        used, left = storage.run_usage(row.run), removal.left_elsewhere(row)
        removal.remove(row)
        size = used.size if used else 0
        remains = [{"location": location, "command": command} for location, command in left]
        removed.append({"run": row.run, "bytes": size, "left": remains})
        if not args.json:
            output.say(f"{row.run}: removed, {readable(size)}", *map(_left, left))
    if args.json:
        output.emit(removed)
    return 0


def _left(found: tuple[str, str | None]) -> str:
    location, command = found
    return f"  left    {location}: {command or 'the job file names it, and other runs may use it'}"


def _named(names: list[str]) -> list[Run]:
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
    return list(rows.values())
