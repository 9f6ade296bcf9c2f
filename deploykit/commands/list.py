"""List all runs, the newest first, with their current state."""

from __future__ import annotations

import argparse

from deploykit import lifecycle, registry
from deploykit.commands import output
from deploykit.registry import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --limit."""
    parser.add_argument(
        *("-n", "--limit"), type=_count, default=20, metavar="N", help="at most N (default 20)"
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for each run."""
    every = registry.every()
    rows = lifecycle.refresh(every[: args.limit])
    if args.json:
        output.emit([output.run_data(row) for row in rows])
        return 0
    if not rows:
        output.note("no runs yet; `deploykit submit --backend local` starts one")
        return 0
    output.table(
        ["run", "backend", "state", "submitted (UTC)", "reason"],
        [[row.run, row.backend, row.state, _minute(row), row.reason] for row in rows],
    )
    if len(rows) < len(every):
        output.note(f"the newest {len(rows)} of {len(every)} runs; all: -n {len(every)}")
    return 0


def _count(text: str) -> int:
    """A whole number of at least 1. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _minute(row: Run) -> str:
    return output.when(row)[:16].replace("T", " ")
