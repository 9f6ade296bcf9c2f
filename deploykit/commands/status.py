"""Say what runs are doing, and why. Without RUN: all that have not ended, or else the newest."""

from __future__ import annotations

import argparse

from deploykit import lifecycle, runs
from deploykit.commands import diagnose, output
from deploykit.model import State


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="*", metavar="RUN", help="run id, or a unique beginning or end of one"
    )


def run(args: argparse.Namespace) -> int:
    if args.run:
        wanted = [runs.get(name) for name in args.run]
    else:
        wanted = [row for row in runs.every() if not State(row.state).final] or [runs.get(None)]
    rows = lifecycle.refresh(wanted)
    if args.json:
        output.emit([output.run_data(row) for row in rows])
    else:
        for row in rows:
            output.run_text(row, diagnose.brief(row))
    return 0
