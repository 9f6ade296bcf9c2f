"""Package a run's model for serving: weights, code and a description.

The package is a folder in the layout that SageMaker's containers expect: safetensors,
`code/inference.py` with its four functions, `code/requirements.txt`, a model card and a manifest.
The package is complete only after the model has been loaded from it once, without the training
data. Models of the reference trainer and of `save_pretrained` need no code; for other scripts, fill
in the template that `deploykit init --inference` writes.

deploykit export exp-1 --to model                      the last checkpoint
deploykit export exp-1 --checkpoint best --to model
deploykit export exp-1 --to s3://bucket/models/exp-1   model.tar.gz, card and manifest
deploykit export exp-1 --to model.tar.gz
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploykit.cli import output
from deploykit.cli.progress_bar import watching
from deploykit.lib import shell, units
from deploykit.run import export, registry
from deploykit.run.export import Export

SHARED = ("run",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to",
        metavar="LOCATION",
        help="a new folder, a .tar.gz file, or an s3:// prefix (default: ./RUN-model)",
    )
    add_choice(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be packaged, and with which Python"
    )


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Declare what chooses the model of a run."""
    add_checkpoint(parser)
    parser.add_argument(
        "--inference",
        type=Path,
        metavar="FILE",
        help="inference.py to use (default: from the run's source, else the built-in one)",
    )
    parser.add_argument(
        "--python",
        metavar="PYTHON",
        help="Python with torch to load the model (default: the run's, if it exists on this "
        "machine)",
    )


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Declare what chooses the checkpoint of a run."""
    parser.add_argument(
        "--checkpoint",
        metavar="STEP|best|FILE",
        help="checkpoint to use (default: the last, or the best if --patience stopped the run)",
    )


def run(args: argparse.Namespace) -> int:
    row = registry.get(args.run)
    prepared = export.prepare(
        row,
        args.to or f"{row.run}-model",
        checkpoint=args.checkpoint,
        python=args.python,
        inference=args.inference,
    )
    if not args.dry_run:
        with watching():
            prepared.write()
    _report(prepared, args)
    return 0


def _report(prepared: Export, args: argparse.Namespace) -> None:
    checkpoint = prepared.checkpoint
    name = checkpoint.label
    if args.json:
        data = {"run": prepared.row.run, "checkpoint": name, "to": prepared.to}
        files = [{"path": each.path, "bytes": each.file.size} for each in checkpoint.files]
        output.emit({**data, "python": prepared.python, "files": files})
        return
    size = units.size(checkpoint.size)
    if args.dry_run:
        output.say(*(f"{units.size(each.file.size):>10}  {each.path}" for each in checkpoint.files))
        output.say(f"would package {name} ({size}) with the source code of {prepared.row.run}")
        output.say(f"would write {prepared.to}, with {prepared.python}")
        return
    output.say(f"{prepared.to}: {name} of {prepared.row.run}, loaded once to check it")
    if not prepared.to.startswith("s3://") and not prepared.to.endswith(".tar.gz"):
        output.note(f"serve it: {shell.command('deploykit', 'deploy', Path(prepared.to))}")
