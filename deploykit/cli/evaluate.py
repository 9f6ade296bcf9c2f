"""Evaluate a run's model on its test data, in a new run on the same backend.

The new run uses the same source, job and data, on one node unless you set resources.nodes. It
writes metrics and `evaluation.json`: for classification, the confusion matrix, calibration and
scores of each class; for regression, the errors; for language models, the perplexity; and the worst
samples. `report` shows the results, and `compare` shows two models side by side. Models of the
reference trainer need no code; for other scripts, write an evaluate.py. Arguments after `--` are
passed to it.

deploykit evaluate exp-1 --wait                          the last checkpoint, on the test data
deploykit evaluate exp-1 --checkpoint best --split validation
deploykit evaluate exp-1 --slice-by region               also separate results per region
deploykit evaluate exp-1 --script evaluate.py            your own program
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploykit.cli import export, output, rerun, submit
from deploykit.cli.progress_bar import watching
from deploykit.lib import shell
from deploykit.lib.errors import NotFound
from deploykit.run import deployments, evaluation, registry
from deploykit.run.export import MANIFEST
from deploykit.run.registry import Run

SHARED = ("run", "set", "again", "sending")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    export.add_checkpoint(parser)
    parser.add_argument(
        "--split",
        metavar="NAME",
        help="test, validation or training (default: test, else validation)",
    )
    parser.add_argument(
        "--slice-by",
        metavar="COLUMN",
        help="also show separate results for each value of this column",
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="program to run (default: the built-in one for the reference trainer, else "
        "evaluate.py in the run's source)",
    )


def run(args: argparse.Namespace) -> int:
    """Submit the evaluation, or print its plan; with --wait, return its exit code."""
    row = _row(args.run)
    with (
        watching(),
        evaluation.prepare(
            row,
            checkpoint=args.checkpoint,
            split=args.split,
            slice_by=args.slice_by,
            script=args.script,
            overrides=args.set,
            arguments=args.arguments,
            backend=args.backend,
            run=args.new_run,
            fetch_first=not args.dry_run,
        ) as planned,
    ):
        output.warnings(planned.prepared.warnings)
        if args.dry_run:
            submit.show(planned.prepared, as_json=args.json)
            return 0
        submit.announce(planned.prepared)
        new = planned.submit()
    output.note(f"{new.run}: evaluating {planned.checkpoint.label} of {row.run}")
    command = shell.command("deploykit", "report", row.run)
    output.note(f"  show the results later: {command}")
    code = rerun.shown(new, args)
    if args.wait and not args.json and (result := evaluation.result(registry.get(new.run))):
        output.say(*(f"  {name} {value:.6g}" for name, value in result.numbers.items()))
    return code


def _row(name: str | None) -> Run:
    try:
        return registry.get(name)
    except NotFound:
        if not Path(name or "", MANIFEST).is_file():
            raise
        made, _ = deployments.origin(Path(str(name)))
        hint = f"evaluate its run: {shell.command('deploykit', 'evaluate', made)}"
        raise NotFound(f"{name} is a package, not a run", hint=hint) from None
