"""Register a run's model in a model registry, with its metrics, approval and origin.

With `track: {mlflow: ...}`, the package becomes a version of a registered model in MLflow. If the
run's backend, or the one given with --backend, has its own registry, it also becomes a version
there. The version records the run, checkpoint, commit, data and job that produced the model.
Registering the same package again creates no second version; it only changes the approval.

deploykit register exp-1                                 the last checkpoint, pending approval
deploykit register exp-1 --checkpoint best --name vision
deploykit register exp-1 --approval approved             approve it, now or later
deploykit register model --dry-run                       a package made by `deploykit export`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from deploykit.cli import deploy, export, output
from deploykit.cli.progress_bar import watching
from deploykit.job import file as jobfile
from deploykit.observe.trackers.contract import ModelVersion
from deploykit.run import deployments
from deploykit.run import register as run_register


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="RUN|FOLDER",
        help="a run, or a package made by `deploykit export` (default: the newest run)",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="name of the registered model (default: the job's name)"
    )
    parser.add_argument(
        "--approval",
        choices=run_register.APPROVALS,
        help="approval status of the model (default: pending, or unchanged if already registered)",
    )
    parser.add_argument(
        *("-b", "--backend"),
        metavar="BACKEND",
        help="backend with a registry to add the model to as well (default: the run's, if it has "
        "one)",
    )
    parser.add_argument(
        "--job",
        type=Path,
        metavar="FILE",
        help=f"job file with the backend's section (default: the run's, or {jobfile.DEFAULT})",
    )
    export.add_choice(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent")


def run(args: argparse.Namespace) -> int:
    folder, _ = deploy.package_of(args, write=True)
    planned = run_register.prepare(
        deployments.package(folder),
        args.name,
        args.approval,
        backend_name=args.backend,
        job=args.job,
    )
    if args.dry_run:
        _show(planned, args)
        return 0
    with watching():
        versions = list(planned.send())
    if args.json:
        output.emit({"versions": [version._asdict() for version in versions]})
    else:
        output.say(*map(_line, versions))
    return 0


def _show(planned: run_register.Registrations, args: argparse.Namespace) -> None:
    data: list[dict[str, Any]] = list(planned.data())
    if args.json:
        output.emit({"registries": data})
        return
    model = planned.model
    output.say(*(json.dumps(one["requests"], indent=2) for one in data))
    for one in data:
        output.note(f"{one['registry']}: would register {model.description} as {model.name}")


def _line(one: ModelVersion) -> str:
    done = "registered" if one.is_new else "already registered"
    return f"{one.name} version {one.version}: {done}, {one.approval}: {one.address}"
