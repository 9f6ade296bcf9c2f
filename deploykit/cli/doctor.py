"""Check the target for anything that would block the job: each finding, its evidence and its fix.

Changes and starts nothing. Without --backend: every backend that has a section in the file, or else
this machine. Exits with 0 when nothing would block the job, with 80 otherwise.

deploykit doctor -b sagemaker --fix terraform
deploykit doctor -b slurm --save facts
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.cli import output
from deploykit.doctor import snippets
from deploykit.job.file import JobFile
from deploykit.lib import finding
from deploykit.lib.errors import UsageError
from deploykit.lib.finding import Finding
from deploykit.run import lifecycle

FAULT_FOUND = 80
"""As for `diagnose`: the command worked, and found that the job would not."""
_WIDTH = 100
SHARED = ("job",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the backends, and what to do with the facts and fixes."""
    parser.add_argument(
        "-b",
        "--backend",
        action="append",
        metavar="BACKEND",
        help="check this target (repeatable)",
        default=[],
    )
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="save the facts as well, for --from"
    )
    parser.add_argument(
        "--from",
        type=Path,
        dest="saved",
        metavar="FOLDER",
        help="check saved facts offline: JSON written by --save or by the AWS CLI",
    )
    parser.add_argument(
        "--fix",
        choices=snippets.LANGUAGES,
        default=snippets.CLI,
        help="language of the fixes (default: aws-cli); --json contains all",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings of each backend; return FAULT_FOUND where one stops the job."""
    if args.save and args.saved:
        raise UsageError("--save and --from cannot be used together")
    file = lifecycle.load(args.job, args.set, args.backend, args.arguments)
    names = list(file.sections)
    findings = [(name, one) for name in names for one in _examine(name, file, args)]
    if args.json:
        output.emit({"findings": [_data(name, one) for name, one in findings]})
    else:
        _print(names, findings, args.fix)
    return FAULT_FOUND if finding.blocks(one for _, one in findings) else 0


def _examine(name: str, file: JobFile, args: argparse.Namespace) -> list[Finding]:
    """The findings of one backend, the worst first."""
    doctor = backend.require(name, "examine")
    lifecycle.check(file, name)
    if backend.offers(doctor, "named_python") and not args.saved:
        python = doctor.named_python(file.job, file.sections[name])
        output.note(*([f"doctor runs {python}, which the job file names"] if python else []))
    findings = doctor.examine(file.job, file.sections[name], saved=args.saved, save=args.save)
    return finding.by_severity(findings)


def _data(name: str, one: Finding) -> dict[str, Any]:
    return {
        "backend": name,
        "code": one.code,
        "severity": one.severity,
        "message": one.message,
        "evidence": one.evidence,
        "fix": vars(one.fix),
    }


def _print(names: list[str], findings: list[tuple[str, Finding]], language: str) -> None:
    for name in names:
        own = [one for where, one in findings if where == name]
        output.say(f"{name}: {finding.count(own)}")
        for one in own:
            output.say("")
            _print_one(one, language)
    if language == snippets.CLI and any(one.fix.cloudformation for _, one in findings):
        output.say("")
        output.say("the same fixes in another language: --fix cloudformation, --fix terraform")
    if any(one.code.startswith(("peers_", "efa_", "encryption_")) for _, one in findings):
        output.say("what security groups must allow, and why: deploykit guide security-groups")


def _print_one(one: Finding, language: str) -> None:
    output.say(*_wrapped(f"{one.severity}: {one.message}", "  "))
    for proof in one.evidence:
        output.say(f"  proof  {proof}")
    output.say(*_wrapped(f"  fix    {one.fix.summary}", " " * 9))
    for key, value in one.fix.settings.items():
        output.say(f"         in the job file: {key}: {value}")
    code = {
        snippets.CLOUDFORMATION: one.fix.cloudformation,
        snippets.TERRAFORM: one.fix.terraform,
    }.get(language, one.fix.cli)
    if one.fix.cli and not code:
        output.say(f"         (not available in {language}; use the command:)")
    if text := code or one.fix.cli:
        output.block("".join(f"    {line}\n" for line in text.rstrip().split("\n")))


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
