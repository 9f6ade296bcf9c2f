"""Show the state of runs, and the reason. Without RUN: all unfinished runs, or else the newest.

deploykit status
deploykit status exp-1 --json
"""

from __future__ import annotations

import argparse

from deploykit import lifecycle, registry, run_diagnosis
from deploykit.commands import output
from deploykit.model import State


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare RUN."""
    parser.add_argument(
        "run", nargs="*", metavar="RUN", help="run id, or its unique beginning or end"
    )


def run(args: argparse.Namespace) -> int:
    """Print the state of each run, and the cause where one failed."""
    if args.run:
        selected = [registry.get(name) for name in args.run]
    else:
        selected = [row for row in registry.every() if not State(row.state).final] or [
            registry.get(None)
        ]
    rows = lifecycle.refresh(selected)
    if args.json:
        output.emit([output.run_data(row) for row in rows])
    else:
        for row in rows:
            output.run_text(row, run_diagnosis.brief(row))
    return 0
