"""Take up a training job of SageMaker that was sent from another machine, by its name alone.

From then on `status`, `logs`, `wait` and `cancel` know it here too.
"""

from __future__ import annotations

import argparse
import os

from deploykit import lifecycle
from deploykit.commands import output
from deploykit.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the job's name: the whole run id")
    parser.add_argument(
        "--region", metavar="R", help="default: AWS_REGION, then AWS_DEFAULT_REGION"
    )


def run(args: argparse.Namespace) -> int:
    chosen = (args.region, os.environ.get("AWS_REGION"), os.environ.get("AWS_DEFAULT_REGION"))
    region = next(filter(None, chosen), None)
    if region is None:
        raise UsageError("no region is chosen", hint="--region, or AWS_REGION")
    row = lifecycle.attach(args.run, "sagemaker", region)
    if args.json:
        output.emit(output.run_data(row))
    else:
        output.run_text(row)
    return 0
