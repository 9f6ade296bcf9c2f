"""Track a run that was submitted on another machine, given only its run id.

`status`, `logs`, `wait` and `cancel` then work with it on this machine too.

deploykit attach exp-20261122-120000-abcd -b sagemaker --target eu-west-1
"""

from __future__ import annotations

import argparse

from deploykit.cli import describe, output
from deploykit.run import lifecycle
from deploykit.run import state as run_state

SHARED = ("backend",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="full run id, which is also the name of the job on the target"
    )
    parser.add_argument(
        "--target",
        metavar="TARGET",
        help="where the job runs, such as a region (default: from the environment, such as "
        "AWS_REGION)",
    )


def run(args: argparse.Namespace) -> int:
    row = run_state.attach(args.run, lifecycle.chosen(args.backend), args.target)
    if args.json:
        output.emit(describe.run_data(row))
    else:
        describe.run_brief(row)
    return 0
