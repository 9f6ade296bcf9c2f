"""Find every problem of a job file, without network, credentials or a cluster.

Without --backend: for every backend that has a section in the file, or else for this machine.
"""

from __future__ import annotations

import argparse

from deploykit import bundle, lifecycle, secret_scan
from deploykit.commands import output
from deploykit.errors import JobFileError
from deploykit.jobfile import JobFile
from deploykit.model import Problem

SHARED = ("job", "strict")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --backend."""
    parser.add_argument(
        "-b", "--backend", action="append", metavar="B", help="check for this backend (repeatable)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the warnings; raise JobFileError with every error of every backend."""
    file = lifecycle.load(args.job, args.set, args.backend or (), args.arguments)
    names = list(file.sections)
    warnings = _check(file, names)
    if args.strict:
        lifecycle.refuse(args.job, warnings)
    if args.json:
        output.emit({"backends": names, "warnings": [vars(problem) for problem in warnings]})
        return 0
    output.warnings(warnings)
    output.say(f"{args.job}: no errors for {', '.join(names)}")
    return 0


def _check(file: JobFile, names: list[str]) -> list[Problem]:
    """The warnings of all backends; every error of all of them, and of the bundle, at once."""
    problems: list[Problem] = []
    for name in names:
        problems += lifecycle.problems(file, name)
    problems += secret_scan.check(file.job, file.sections)
    try:
        problems += bundle.scan(lifecycle.source(file), file.job.max_bundle).warnings
    except JobFileError as error:
        problems += error.problems
    return file.raise_on(problems)
