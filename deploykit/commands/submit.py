"""Run a job on a backend. With --dry-run, print exactly what would be sent, and send nothing.

What follows `--` goes to the trainer, after the arguments of the job file:
deploykit submit -- --lr 0.1
"""

from __future__ import annotations

import argparse

from deploykit import lifecycle
from deploykit.bundle import readable
from deploykit.commands import output
from deploykit.lifecycle import Prepared
from deploykit.model import Entry

_LARGE = 10_000_000
"""Bytes of a source above which its largest files are named."""
_SHOWN = 3
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
    if not args.json:
        _name_largest(prepared)
    if args.dry_run:
        show(prepared, as_json=args.json)
        return 0
    if prepared.plan.summary:
        output.note(prepared.plan.summary)
    if output.on_terminal():
        from deploykit.commands.progress_bar import watching

        with watching():
            row = lifecycle.submit(prepared.plan)
    else:
        row = lifecycle.submit(prepared.plan)
    if not args.wait:
        if args.json:
            output.emit(output.run_data(row))
        else:
            output.run_text(row)
            output.say(f"  source  {_files(prepared)}")
        return 0
    output.note(f"{row.run}: submitted as {row.handle}; its folder is {row.folder}")
    output.note(f"source: {_files(prepared)}")
    from deploykit.commands import wait  # not needed for a dry run

    return wait.follow(row, as_json=args.json, timeout=None)


def _files(prepared: Prepared) -> str:
    """How much travels, besides the node plane."""
    sizes = [entry.size for entry in _entries(prepared)]
    return f"{len(sizes)} file{'s' * (len(sizes) != 1)}, {readable(sum(sizes))}"


def _entries(prepared: Prepared) -> list[Entry]:
    """The source's own files and links."""
    return [entry for entry in prepared.plan.bundle.entries if entry.content is None]


def _name_largest(prepared: Prepared) -> None:
    """Note how large a large source is, and why."""
    entries = sorted(_entries(prepared), key=lambda entry: -entry.size)
    if sum(entry.size for entry in entries) > _LARGE:
        large = [entry for entry in entries if entry.size > _LARGE // 100] or entries
        largest = (f"{entry.path} ({readable(entry.size)})" for entry in large[:_SHOWN])
        output.note(
            f"source: {_files(prepared)}; the largest: {', '.join(largest)}",
            "  what the job does not need can stay behind: add it to .deploykitignore",
        )


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
