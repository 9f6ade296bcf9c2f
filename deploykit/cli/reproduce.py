"""Submit an exact copy of a run: the same bundle (by its hash), job and arguments.

Only the run id differs. If the job names a location for results or checkpoints, the new run uses
its own subfolder there, so it does not resume from the old run or overwrite its files. Data is not
copied, so it may have changed since. To change something, use `rerun`.

deploykit reproduce exp-1
deploykit reproduce exp-1 --backend local --wait
"""

from __future__ import annotations

import argparse
import shlex

from deploykit.cli import output, rerun, submit
from deploykit.lib import shell
from deploykit.run import registry
from deploykit.run.rerun import reproduce

SHARED = ("run", "again", "sending")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--new-launcher",
        action="store_true",
        help="use this version's launcher, even if the run used another one",
    )


def run(args: argparse.Namespace) -> int:
    """Submit the same again, or print its plan; with --wait, return the job's exit code."""
    row = registry.get(args.run)
    with reproduce(row, args.new_run, args.backend, new_launcher=args.new_launcher) as same:
        output.warnings(same.prepared.warnings)
        output.note(*(f"{name}: {location}" for name, location in same.moved.items()))
        if same.unlocked:
            output.note(
                f"the dependencies of {same.unlocked} may resolve to other versions, because it "
                f"has no lock file; `uv lock --script {shlex.quote(same.unlocked)}` writes one"
            )
        if args.dry_run:
            submit.show(same.prepared, as_json=args.json)
            return 0
        new = same.submit()
    output.note(f"{new.run}: sent bundle {new.bundle[:12]} of {row.run}")
    output.note(
        f"  to compare them later: {shell.command('deploykit', 'compare', row.run, new.run)}"
    )
    return rerun.shown(new, args)
