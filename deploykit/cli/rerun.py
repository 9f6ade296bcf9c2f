"""Submit the job of a run again, with the same source and arguments, as a new run.

It uses the job and source that the run submitted, even if the folder has changed since. Files
elsewhere (data, checkpoints) are used as they are now. The launcher is that of this version.

deploykit rerun exp-1                              unchanged
deploykit rerun exp-1 --set resources.nodes=2      on two nodes
deploykit rerun exp-1 --backend local              on this machine
deploykit rerun exp-1 -- --lr 0.1                  with more arguments
"""

from __future__ import annotations

import argparse

from deploykit.cli import describe, output, submit, wait
from deploykit.run import lifecycle, registry, rerun
from deploykit.run.registry import Run

SHARED = ("run", "set", "again", "sending")


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
    output.note(f"{new.run}: reruns {row.run}, submitted {output.when(row.created)}")
    return shown(new, args)


def shown(new: Run, args: argparse.Namespace) -> int:
    """Print a run that was just sent; with --wait follow it, and return its exit code."""
    if args.wait:
        return wait.follow(new, as_json=args.json, timeout=None)
    if args.json:
        output.emit(describe.run_data(new))
    else:
        describe.run_brief(new)
    return 0
