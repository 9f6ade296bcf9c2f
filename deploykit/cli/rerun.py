"""Submit the job of a run again, with the same source and arguments, as a new run.

The job and its source are those that the run sent, whatever its folder holds now. Files that they
name elsewhere (data, checkpoints) are used as they are now; the launcher is this version's.

deploykit rerun exp-1                              unchanged
deploykit rerun exp-1 --set resources.nodes=2      on two nodes
deploykit rerun exp-1 --backend local              on this machine
deploykit rerun exp-1 -- --lr 0.1                  with more arguments, after its own
"""

from __future__ import annotations

import argparse

from deploykit.cli import output, submit, wait
from deploykit.run import lifecycle, registry, rerun
from deploykit.run.registry import Run

SHARED = ("run",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what may differ from the earlier run."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of its job, e.g. resources.nodes=2",
    )
    parser.add_argument(
        *("-b", "--backend"), metavar="BACKEND", help="send it elsewhere (default: where it was)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent")
    parser.add_argument(
        "--wait", action="store_true", help="follow the logs, exit with its exit code"
    )
    parser.add_argument("--run", dest="new_run", metavar="ID", help="id of the new run")


def run(args: argparse.Namespace) -> int:
    """Submit the job again, or print its plan; with --wait, return the job's exit code."""
    row = registry.get(args.run)
    with rerun.prepare(row, args.set, args.new_run, args.arguments, args.backend) as prepared:
        output.warnings(prepared.warnings)
        if args.dry_run:
            submit.show(prepared, as_json=args.json)
            return 0
        submit.announce(prepared)
        new = lifecycle.submit(prepared.plan)
    output.note(f"{new.run}: the job and the source of {row.run}, sent {output.when(row.created)}")
    return shown(new, args)


def shown(new: Run, args: argparse.Namespace) -> int:
    """Print a run that was just sent; with --wait follow it, and return its exit code."""
    if args.wait:
        return wait.follow(new, as_json=args.json, timeout=None)
    if args.json:
        output.emit(output.run_data(new))
    else:
        output.run_text(new)
    return 0
