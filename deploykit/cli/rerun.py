"""Submit a run's job again as a new run, with the same source and arguments.

The job and source are those that the run submitted, even if the folder has changed since. Files
elsewhere (data, checkpoints) are used in their current state. The launcher comes from this version.

deploykit rerun exp-1                              unchanged
deploykit rerun exp-1 --set resources.nodes=2      on two nodes
deploykit rerun exp-1 --backend local              on this machine
deploykit rerun exp-1 -- --lr 0.1                  with more arguments
deploykit rerun exp-1 --failed                     only the failed tasks of a job array
deploykit rerun SWEEP --failed                     only the failed trials of a sweep
"""

from __future__ import annotations

import argparse

from deploykit.cli import describe, output, submit, wait
from deploykit.job.file import Overrides
from deploykit.lib.errors import UsageError
from deploykit.run import lifecycle, registry, rerun
from deploykit.run import state as run_state
from deploykit.run.registry import Run
from deploykit.sweep import folder

SHARED = ("run", "set", "again", "sending")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--failed",
        action="store_true",
        help="for a job array, rerun only the failed and cancelled tasks; for a sweep, rerun each "
        "failed trial with the same values",
    )


def run(args: argparse.Namespace) -> int:
    """Submit the job again, or print its plan; with --wait, return the job's exit code."""
    if args.failed and (sweep := folder.named(args.run)):
        return _trials(sweep, args)
    row = registry.get(args.run)
    overrides: Overrides = args.set
    if args.failed:
        (row,) = run_state.refresh([row])
        overrides = [*overrides, *rerun.only_failed(row, args.backend)]
    with rerun.prepare(row, overrides, args.new_run, args.arguments, args.backend) as prepared:
        output.warnings(prepared.warnings)
        if args.dry_run:
            submit.show(prepared, as_json=args.json)
            return 0
        submit.announce(prepared)
        new = lifecycle.submit(prepared.plan)
    output.note(f"{new.run}: rerun of {row.run}, which was submitted at {output.when(row.created)}")
    return shown(new, args)


def _trials(sweep: folder.SweepRecord, args: argparse.Namespace) -> int:
    """Try the failed trials of a sweep again. Raises UsageError for options that change a job."""
    changes = {
        "--set": args.set,
        "--backend": args.backend,
        "--run": args.new_run,
        "--dry-run": args.dry_run,
        "an argument after `--`": args.arguments,
    }
    for name, value in changes.items():
        if value:
            raise UsageError(
                f"{name} does not apply to a sweep", hint="the trials keep their original job"
            )
    folder.require_optuna()
    from deploykit.cli import sweep_actions  # imports Optuna, which was just found

    return sweep_actions.retry_failed(sweep, as_json=args.json)


def shown(new: Run, args: argparse.Namespace) -> int:
    """Print a run that was just sent; with --wait follow it, and return its exit code."""
    if args.wait:
        return wait.follow(new, as_json=args.json, timeout=None)
    if args.json:
        output.emit(describe.run_data(new))
    else:
        describe.run_brief(new)
    return 0
