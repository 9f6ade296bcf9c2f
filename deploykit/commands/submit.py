"""Run a job on a backend. With --dry-run, print exactly what would be sent, and send nothing.

What follows `--` goes to the trainer, after the arguments of the job file:
deploykit submit -- --lr 0.1
"""

from __future__ import annotations

import argparse

from deploykit import lifecycle
from deploykit.commands import output
from deploykit.lifecycle import Prepared

SHARED = ("job", "backend", "strict")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a submit."""
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent")
    parser.add_argument(
        "--wait", action="store_true", help="follow the logs, exit with its exit code"
    )
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="test the network between the nodes first, for at most 30 seconds",
    )
    parser.add_argument(
        "--debug", action="store_true", help="write debug output of NCCL and PyTorch to files"
    )
    parser.add_argument("--run", metavar="ID", help="run id; the same id never starts a second job")


def run(args: argparse.Namespace) -> int:
    """Submit the job, or print its plan; with --wait, return the job's exit code."""
    switches = [f"{name}=true" for name in ("preflight", "debug") if getattr(args, name)]
    overrides = [*args.set, *switches]
    backend = lifecycle.chosen(args.backend, args.job, overrides)
    prepared = lifecycle.prepare(args.job, overrides, backend, args.run, args.arguments)
    if args.strict:
        lifecycle.refuse(args.job, prepared.warnings)
    output.warnings(prepared.warnings)
    if args.dry_run:
        show(prepared, as_json=args.json)
        return 0
    if prepared.plan.summary:
        output.note(prepared.plan.summary)
    row = lifecycle.submit(prepared.plan)
    if not args.wait:
        if args.json:
            output.emit(output.run_data(row))
        else:
            output.run_text(row)
        return 0
    output.note(f"{row.run}: submitted as {row.handle}; its folder is {row.folder}")
    from deploykit.commands import wait  # not needed for a dry run

    return wait.follow(row, as_json=args.json, timeout=None)


def show(prepared: Prepared, *, as_json: bool) -> None:
    """Print the text of a plan, or all of it as JSON."""
    plan = prepared.plan
    if not as_json:
        output.block(plan.text)
        return
    output.emit(
        {
            "run": plan.run,
            "backend": plan.backend,
            "target": plan.target,
            "language": plan.language,
            "text": plan.text,
            "bundle": {
                "hash": plan.bundle.hash,
                "bytes": plan.bundle.size,
                "commit": plan.bundle.commit,
                "files": [entry.path for entry in plan.bundle.entries],
                "kept_back": list(plan.bundle.kept_back),
            },
            "warnings": [vars(problem) for problem in prepared.warnings],
        }
    )
