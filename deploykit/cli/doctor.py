"""Check the target for anything that would block the job: each finding, its evidence and its fix.

Starts and changes nothing. Without --backend, covers the file's `backend` and every backend with a
section in it, else the default backend. Without a job file, assumes a job with one process. Exits
with 0 if nothing would block the job, otherwise with 80.

deploykit doctor -b sagemaker --fix terraform
deploykit doctor -b slurm --save facts
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.cli import output
from deploykit.doctor import fixes
from deploykit.doctor.codes import CODES
from deploykit.job import file as jobfile
from deploykit.job.file import JobFile
from deploykit.lib import finding
from deploykit.lib.errors import UsageError
from deploykit.lib.finding import Finding
from deploykit.run import lifecycle

FAULT_FOUND = 80
"""As for `diagnose`: the command worked, and found that the job would not."""
_WIDTH = 100
_SMALLEST = ("entrypoint={module: platform}", "resources.time_limit=10m")
"""Stands for a job where there is none: a module that every Python has."""
SHARED = ("job", "backends")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FOLDER",
        help="also save the collected facts, for use with --from",
    )
    parser.add_argument(
        "--from",
        type=Path,
        dest="saved",
        metavar="FOLDER",
        help="check saved facts offline, from JSON files written by --save or the AWS CLI",
    )
    parser.add_argument(
        "--fix",
        choices=fixes.LANGUAGES,
        default=fixes.CLI,
        help="language of the fixes (default: aws-cli); --json contains both",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings of each backend; return FAULT_FOUND if one stops the job."""
    if args.save and args.saved:
        raise UsageError("--save and --from cannot be used together")
    overrides = args.set
    if args.job == Path(jobfile.DEFAULT) and not args.job.exists() and not _has_entrypoint(args):
        output.note(f"note: no {args.job} here; assuming a job with one process")
        overrides = [*_SMALLEST, *overrides]
    file = lifecycle.load(args.job, overrides, args.backend, args.arguments)
    by_backend = {name: _examine(name, file, args) for name in file.sections}
    findings = [result for own in by_backend.values() for result in own]
    if args.json:
        records = [
            {"backend": name, **vars(result), "fix": vars(result.fix)}
            for name, own in by_backend.items()
            for result in own
        ]
        output.emit({"findings": records})
    else:
        for name, own in by_backend.items():
            output.say(f"{name}: {finding.count(own)}")
            for result in own:
                output.say("")
                _print_finding(result, args.fix)
        _print_hints(findings, args.fix)
    return FAULT_FOUND if finding.blocks(findings) else 0


def _has_entrypoint(args: argparse.Namespace) -> bool:
    """Whether the command line names what to run."""
    return any(text.startswith("entrypoint") for text in args.set)


def _examine(name: str, file: JobFile, args: argparse.Namespace) -> list[Finding]:
    """The findings of one backend, the worst first."""
    doctor = backend.require(name, "examine")
    lifecycle.check(file, name)
    findings = doctor.examine(file.job, file.sections[name], saved=args.saved, save=args.save)
    return finding.by_severity(findings)


def _print_hints(findings: list[Finding], language: str) -> None:
    if language == fixes.CLI and any(result.fix.terraform for result in findings):
        output.say("")
        output.say("for the same fixes in Terraform, add --fix terraform")
    if any(result.code.startswith(("peers_", "efa_", "encryption_")) for result in findings):
        output.say("`deploykit guide security-groups` explains what security groups must allow")


def _print_finding(result: Finding, language: str) -> None:
    output.say(*_wrapped(f"{result.severity}: {result.message}", "  "))
    for proof in result.evidence:
        output.say(f"  proof  {proof}")
    output.say(*_wrapped(f"  fix    {result.fix.summary}", " " * 9))
    for key, value in result.fix.settings.items():
        output.say(f"         in the job file: {key}: {value}")
    code = result.fix.terraform if language == fixes.TERRAFORM else result.fix.cli
    if result.fix.cli and not code:
        output.say(f"         (not available in {language}; use the command:)")
    if text := code or result.fix.cli:
        output.block("".join(f"    {line}\n" for line in text.rstrip().split("\n")))
    if result.code in CODES:
        output.say(f"  more   deploykit explain {result.code}")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
