"""Submit exactly what a run sent: the same bundle, by its hash, the same job and arguments.

Only the run id differs. Where the job names a location for results or checkpoints, the new run gets
its own subfolder, so that it neither resumes from the old run nor overwrites its files. Data is
read as it is now. To change something, use `rerun`.

deploykit reproduce exp-1
deploykit reproduce exp-1 --backend local --wait
"""

from __future__ import annotations

import argparse

from deploykit.cli import output, rerun, submit
from deploykit.lib import shell
from deploykit.run import registry
from deploykit.run.rerun import reproduce

SHARED = ("run",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where to send it, and how to follow it."""
    parser.add_argument(
        *("-b", "--backend"), metavar="BACKEND", help="send it elsewhere (default: where it was)"
    )
    parser.add_argument(
        "--new-launcher",
        action="store_true",
        help="accept the launcher of this deploykit, where the run had another",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent")
    parser.add_argument(
        "--wait", action="store_true", help="follow the logs, exit with its exit code"
    )
    parser.add_argument("--run", dest="new_run", metavar="ID", help="id of the new run")


def run(args: argparse.Namespace) -> int:
    """Submit the same again, or print its plan; with --wait, return the job's exit code."""
    row = registry.get(args.run)
    with reproduce(row, args.new_run, args.backend, new_launcher=args.new_launcher) as same:
        output.warnings(same.prepared.warnings)
        output.note(*(f"{name}: {location}" for name, location in same.moved.items()))
        if args.dry_run:
            submit.show(same.prepared, as_json=args.json)
            return 0
        new = same.submit()
    output.note(f"{new.run}: the bundle {new.bundle[:12]} of {row.run}")
    output.note(f"  then: {shell.command('deploykit', 'compare', row.run, new.run)}")
    return rerun.shown(new, args)
