"""Stop a run; one that has ended is left as it is.

Its ranks get SIGTERM and time to save, but on SageMaker, whose launchers pass nothing on.
"""

from __future__ import annotations

import argparse

from deploykit import lifecycle, runs
from deploykit.commands import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id, or a unique beginning or end of one")


def run(args: argparse.Namespace) -> int:
    row = lifecycle.cancel(runs.get(args.run))
    if args.json:
        output.emit(output.run_data(row))
    else:
        output.run_text(row)
    return 0
