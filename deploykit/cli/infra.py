"""Generate templates for the AWS resources that jobs require, from a few answers.

`render` writes a CloudFormation stack, a container recipe and, if the answers contain `cluster`, a
configuration for AWS ParallelCluster. `check` only validates the answers, and runs cfn-lint on the
stack if cfn-lint is installed. `render --submitter JOB` writes the minimal IAM policy for users who
submit that job file. No action connects to AWS.

deploykit infra render infra.yaml --out infra
deploykit infra check infra.yaml
deploykit infra render --submitter job.yaml
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.cli import output
from deploykit.doctor import infra
from deploykit.job.model import Problem
from deploykit.lib import shell
from deploykit.lib.errors import JobFileError, UsageError
from deploykit.run import lifecycle

_LINTER = "cfn-lint"
_POLICY = "submitter.json"
_OFFER = "submitter_policy"
"""What the backend must offer for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("render", "check"), help="write the files, or only validate the answers"
    )
    parser.add_argument(
        "answers",
        nargs="?",
        type=Path,
        default=Path("infra.yaml"),
        metavar="FILE",
        help="file with the answers, YAML or TOML (default: infra.yaml)",
    )
    parser.add_argument(
        "--submitter",
        nargs="?",
        type=Path,
        const=Path("job.yaml"),
        metavar="JOB",
        help="write only the IAM policy for users who submit this job file (default: job.yaml)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("infra"),
        metavar="FOLDER",
        help="destination folder (default: infra)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def run(args: argparse.Namespace) -> int:
    if args.submitter:
        return _submitter(args)
    chosen = infra.load(args.answers)
    files = dict(infra.files(chosen))
    if args.action == "check":
        linted = _lint(files["stack.yaml"])
        _print(args, [f"{args.answers}: no errors"], {"files": list(files), "linted": linted})
        if not linted:
            output.note(
                f"note: {_LINTER} is not installed; install it to check the stack more thoroughly"
            )
        return 0
    _write(args.out, files, force=args.force)
    steps = infra.commands(chosen)
    wrote = f"wrote {', '.join(files)} to {args.out}; next, in that folder:"
    _print(args, [wrote, *steps], {"folder": str(args.out), "files": list(files), "next": steps})
    return 0


def _submitter(args: argparse.Namespace) -> int:
    """Write the policy of whoever submits a job, and print the command that attaches it."""
    if args.action != "render":
        raise UsageError(
            "--submitter applies only to `render`",
            hint="use `deploykit infra render --submitter job.yaml`",
        )
    names = (each for each in backend.names() if backend.offers(backend.find(each), _OFFER))
    plan = lifecycle.prepare(args.submitter, (), next(names), None).plan
    engine = backend.require(plan.backend, _OFFER)
    policy = engine.submitter_policy(plan.job, plan.options)
    _write(args.out, {_POLICY: json.dumps(policy, indent=2) + "\n"}, force=args.force)
    document = ("--policy-name", "deploykit-submit", "--policy-document", f"file://{_POLICY}")
    step = shell.command("aws", "iam", "create-policy", *document)
    if assumed := plan.options.assume_role:
        name = ("--role-name", assumed.rpartition("/")[2])
        step = shell.command("aws", "iam", "put-role-policy", *name, *document)
    wrote = f"wrote {_POLICY} to {args.out}; next, in that folder:"
    _print(args, [wrote, step], {"folder": str(args.out), "files": [_POLICY], "next": [step]})
    return 0


def _print(args: argparse.Namespace, texts: list[str], data: dict[str, object]) -> None:
    if args.json:
        output.emit(data)
    else:
        output.say(*texts)


def _write(folder: Path, files: dict[str, str], *, force: bool) -> None:
    existing = [name for name in files if (folder / name).exists()]
    if existing and not force:
        raise UsageError(
            f"{folder} already contains {', '.join(existing)}", hint="--force overwrites them"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from error


def _lint(stack: str) -> bool:
    """Run cfn-lint, and return whether it is installed. Raises JobFileError with what it finds."""
    if shutil.which(_LINTER) is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stack.yaml")
        path.write_text(stack, encoding="utf-8")
        done = shell.run([_LINTER, "--format", "parseable", str(path)])
    if done.code:
        lines = (line.partition(":")[2] for line in done.out.splitlines() if line)
        raise JobFileError("the stack", [Problem("", f"{_LINTER}: {line}") for line in lines])
    return True
