"""List all runs, the newest first, with their current state."""

from __future__ import annotations

import argparse

from deploykit import lifecycle, runs
from deploykit.commands import arguments, output
from deploykit.runs import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --limit."""
    parser.add_argument(
        "--limit", type=arguments.count, default=20, metavar="N", help="at most N (default 20)"
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for each run."""
    rows = lifecycle.refresh(runs.every()[: args.limit])
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
    return 0


def _minute(row: Run) -> str:
    return output.when(row)[:16].replace("T", " ")
