"""Stop a run; a run that has ended is not changed.

Its ranks get SIGTERM and time to save, except on SageMaker, whose launchers do not forward signals.
"""

from __future__ import annotations

import argparse

from deploykit import lifecycle, registry
from deploykit.commands import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare RUN."""
    parser.add_argument(
        "run", metavar="RUN", help="run id, or its unique beginning (4 characters or more)"
    )


def run(args: argparse.Namespace) -> int:
    """Stop the run, and print its state."""
    row = lifecycle.cancel(registry.get_to_stop(args.run))
    if args.json:
        output.emit(output.run_data(row))
    else:
        output.run_text(row)
    return 0
