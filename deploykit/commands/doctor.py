"""Look at the place where a job will run, before it is sent: each fault, its proof, and its fix.

Nothing is changed and nothing is started. Without --backend: for every backend that has a section
in the file, or else for this machine. Ends with 0 when nothing is in the way of the job.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from deploykit import backend, jobfile, lifecycle
from deploykit.commands import arguments, output
from deploykit.doctor import finding, snippets
from deploykit.doctor.finding import Finding, Fix
from deploykit.errors import NotFound, NotPermitted, UsageError
from deploykit.jobfile import JobFile

FAULT_FOUND = 80
"""As `diagnose`: nothing went wrong here, but with what was looked at."""
_WIDTH = 100
_MISSHAPEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What the pure functions over saved facts meet where these have another shape."""
_SITE = "site.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.job_file(parser)
    parser.add_argument(
        "--backend", action="append", metavar="B", help="look there (repeatable)", default=[]
    )
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="keep the facts too, for --from"
    )
    parser.add_argument(
        "--from",
        type=Path,
        dest="saved",
        metavar="FOLDER",
        help="judge saved facts and ask nobody: JSON that --save or the AWS CLI wrote",
    )
    parser.add_argument(
        "--fix",
        choices=snippets.LANGUAGES,
        default=snippets.CLI,
        help="language of the fixes (default: aws-cli); --json has all",
    )


def run(args: argparse.Namespace) -> int:
    if args.save and args.saved:
        raise UsageError("--save and --from exclude each other")
    tree, _ = jobfile.parse(args.job)
    names = args.backend or [name for name in backend.names() if name in tree] or ["local"]
    file = lifecycle.load(args.job, args.set, names)
    found = [(name, one) for name in names for one in finding.by_severity(_visit(name)(file, args))]
    if args.json:
        output.emit({"findings": [_data(name, one) for name, one in found]})
    else:
        _tell(names, found, args.fix)
    return FAULT_FOUND if finding.blocks(one for _, one in found) else 0


def _visit(name: str) -> Callable[[JobFile, argparse.Namespace], Iterator[Finding]]:
    known = {"local": _local, "slurm": _slurm, "sagemaker": _sagemaker}
    if name not in known:
        raise UsageError(
            f"doctor cannot look at {name!r}", hint=f"it can look at {', '.join(known)}"
        )
    return known[name]


def _local(file: JobFile, args: argparse.Namespace) -> Iterator[Finding]:
    from deploykit.doctor import local

    lifecycle.check(file, "local")
    python = file.sections["local"].python
    machine = local.load(args.saved) if args.saved else local.inspect(python)
    if args.save:
        local.save(machine, args.save)
    yield from local.findings(file.job, machine)


def _slurm(file: JobFile, args: argparse.Namespace) -> Iterator[Finding]:
    from deploykit import paths
    from deploykit.backends.slurm import fits, site, site_findings

    options = dataclasses.replace(file.sections["slurm"], site=None)
    file.raise_on(backend.find("slurm").check(file.job, options))
    if args.saved:
        found, home = site.load(str(args.saved / _SITE)), None
    else:
        found, home = site.read(), site_findings.runs_folder(paths.state(), site.hosts())
    if args.save:
        site.save(found, args.save / _SITE)
    problems = fits.check(file.job, options, found)
    yield from site_findings.findings(found, found.of(options.partition), problems, home)


def _sagemaker(file: JobFile, args: argparse.Namespace) -> Iterator[Finding]:
    from deploykit.backends.sagemaker import aws as clients
    from deploykit.backends.sagemaker import options as section
    from deploykit.backends.sagemaker import requirements
    from deploykit.doctor import aws
    from deploykit.doctor.aws import collect, inventory

    lifecycle.check(file, "sagemaker")
    options = file.sections["sagemaker"]
    region = section.region(options) or ""
    required = requirements.of_job(file.job, options, region)
    try:
        if args.saved:
            answers = collect.load(args.saved)
        else:
            with clients.errors(region):
                answers = collect.live(required, partial(clients.client, region=region))
    except NotPermitted as error:
        fix = Fix(error.hint or "log in to AWS")
        yield Finding("credentials", "error", str(error), (f"region {region}",), fix)
        return
    if args.save:
        collect.save(answers, args.save)
    with _saved(args.saved):
        yield from aws.findings(required, inventory.parse(answers, required.instance_type))


@contextlib.contextmanager
def _saved(folder: Path | None) -> Iterator[None]:
    """Answers that AWS gave are as AWS says; those of a folder may be anything."""
    try:
        yield
    except _MISSHAPEN as error:
        if folder is None:
            raise
        raise NotFound(
            f"malformed answers of AWS in {folder}: {error!r:.200}",
            hint="create them with `deploykit doctor --save FOLDER`, or save with --output json",
        ) from error


def _data(name: str, one: Finding) -> dict[str, Any]:
    return {
        "backend": name,
        "code": one.code,
        "severity": one.severity,
        "message": one.message,
        "evidence": one.evidence,
        "fix": vars(one.fix),
    }


def _tell(names: list[str], found: list[tuple[str, Finding]], language: str) -> None:
    for name in names:
        mine = [one for where, one in found if where == name]
        output.say(f"{name}: {finding.count(mine)}")
        for one in mine:
            output.say("")
            _tell_one(one, language)
    if language == snippets.CLI and any(one.fix.cloudformation for _, one in found):
        output.say("")
        output.say("the same fixes in another language: --fix cloudformation, --fix terraform")


def _tell_one(one: Finding, language: str) -> None:
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
        output.say(f"         ({language} has no way to say this; the command:)")
    if text := code or one.fix.cli:
        output.block("".join(f"    {line}\n" for line in text.rstrip().split("\n")))


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
