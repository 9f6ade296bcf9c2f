"""Print the JSON Schema of a command's `--json` output, including errors.

Without COMMAND, prints one schema with a definition for each command. Every document, each record
of a list and each line of `logs` contains `schema_version`. The version changes if a key is removed
or changes its meaning; a release can add keys without a new version. For the schema of a job file,
run `deploykit init --schema`.

deploykit schema status
deploykit schema logs           one such document per line
"""

from __future__ import annotations

import argparse

from deploykit.cli import main as cli
from deploykit.cli import output, schemas
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command", nargs="?", metavar="COMMAND", help="print only the schema of this command"
    )


def run(args: argparse.Namespace) -> int:
    if args.command is not None and args.command not in schemas.VERBS:
        hint = did_you_mean(args.command, schemas.VERBS) or "`deploykit --help` lists the commands"
        known = args.command in cli.VERBS
        message = (
            f"{args.command!r} prints no JSON" if known else f"unknown command {args.command!r}"
        )
        raise UsageError(message, hint=hint)
    shown = schemas.every() if args.command is None else schemas.schema(args.command)
    output.emit(shown, foreign=True)
    return 0
