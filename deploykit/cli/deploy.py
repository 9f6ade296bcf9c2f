"""Serve a packaged model over HTTP on this machine, or behind an endpoint of a service.

The model is a package made by `deploykit export`, or a run, whose model is packaged first and kept
in the run folder. As on SageMaker, requests are `GET /ping` and `POST /invocations`.

On this machine, each replica is a process with its own copy of the model. The server has no
authentication or encryption, and accepts only local connections unless you set --host. Requires
`pip install 'deploykit[serve]'`.

With `-b sagemaker`, `sagemaker.deploy` in the job file describes a real-time, serverless or
asynchronous endpoint, or a batch job. Repeating the command updates the endpoint, or completes an
interrupted deployment. `deploykit endpoint` shows, calls and deletes endpoints.

deploykit deploy exp-1                                 the last checkpoint of a run
deploykit deploy model --port 9000 --replicas 2
deploykit deploy exp-1 -b sagemaker --dry-run          print the exact requests and the price
deploykit deploy exp-1 -b sagemaker --for 8h           delete it after eight hours, in any case
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.backends.base import Serving
from deploykit.backends.deployment import Deployment, DeploymentPlan
from deploykit.cli import arguments, endpoint, export, output
from deploykit.cli.progress_bar import watching
from deploykit.job.decode import SIZE
from deploykit.job.file import Option
from deploykit.job.spelling import did_you_mean
from deploykit.lib import paths, shell
from deploykit.lib.errors import NotFound, UsageError
from deploykit.run import deployments, fetch, registry
from deploykit.run import export as run_export

_MAX_PORT = 2**16 - 1
_DIGITS = 18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="RUN|FOLDER",
        help="a run, or a package made by `deploykit export` (default: the newest run)",
    )
    parser.add_argument(
        *("-b", "--backend"),
        default=backend.DEFAULT,
        metavar="BACKEND",
        help="where to serve it (default: this machine)",
    )
    export.add_choice(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the server's command or the requests, and start nothing",
    )
    _add_for_server(parser.add_argument_group("on this machine"))
    _add_for_endpoint(parser.add_argument_group("endpoints and batch jobs"))


def _add_for_server(group: argparse._ArgumentGroup) -> None:
    for name, kind, value, metavar, text in _SERVER:
        shown = {"max-body": "64MiB", "timeout": "60s"}.get(name, value)
        help_text = f"{text} (default: {shown})"
        group.add_argument(f"--{name}", type=kind, default=value, metavar=metavar, help=help_text)
    group.add_argument(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda, or a list that replicas use in turn, such as cuda:0,cuda:1 (default: a "
        "GPU if available)",
    )


def _add_for_endpoint(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--name", metavar="NAME", help="name of the endpoint or batch job (default: the job's name)"
    )
    group.add_argument(
        "--job",
        type=Path,
        metavar="FILE",
        help="job file with the settings (default: job.yaml if it exists, else the run's)",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the job file",
    )
    group.add_argument(
        "--for",
        dest="lifetime",
        metavar="TIME",
        help="delete the endpoint after this time, such as 8h, with a schedule that does not need "
        "your machine; each deploy restarts the time",
    )
    group.add_argument(
        "--max-cost",
        metavar="MONEY",
        help="refuse an endpoint that could cost more within the time of --for, else within a "
        "month",
    )
    group.add_argument(
        "--update",
        action="store_true",
        help="update an endpoint that was not deployed from this machine",
    )
    group.add_argument(
        *("-w", "--wait"),
        action="store_true",
        help="wait until the endpoint is in service; implied by autoscaling",
    )


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text[:_DIGITS]) <= _MAX_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to {_MAX_PORT}")
    return int(text)


def _size(text: str) -> int:
    try:
        return SIZE.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {SIZE.meaning}") from None


_SERVER: tuple[tuple[str, Any, Any, str, str], ...] = (
    ("host", str, "127.0.0.1", "ADDRESS", "address to listen on"),
    ("port", _port, 8080, "PORT", "port to listen on, or 0 for any free port"),
    (
        *("replicas", arguments.count, 1, "N"),
        "number of processes, each with its own copy of the model",
    ),
    ("max-body", _size, 64 << 20, "SIZE", "maximum size of a request"),
    (
        *("concurrency", arguments.count, 64, "N"),
        "maximum number of requests in progress; further requests receive status 503",
    ),
    (
        *("timeout", arguments.seconds, 60.0, "TIME"),
        "time to wait for a free replica, and again for its response",
    ),
    (
        *("max-batch-size", arguments.count, 1, "N"),
        "maximum number of requests in a batch for predict_batch_fn in inference.py",
    ),
    (
        *("batch-timeout", arguments.seconds, 0.01, "TIME"),
        "time that a request waits for others to join its batch",
    ),
)
"""Options of the server, with their types and default values."""
_ENDPOINT: dict[str, Any] = {
    **dict.fromkeys(("name", "job", "lifetime", "max-cost")),
    "set": [],
    "update": False,
    "wait": False,
}
"""Options of endpoints, with their default values."""


def run(args: argparse.Namespace) -> int:
    """Deploy to an endpoint, or become the server; then this returns only after a dry run."""
    engine = backend.require(args.backend, "serve", "plan_deployment")
    if backend.offers(engine, "plan_deployment"):
        _refuse(args, {name: value for name, _, value, *_ in _SERVER} | {"device": None})
        return _deploy(args)
    _refuse(args, _ENDPOINT)
    package, python = package_of(args, write=not args.dry_run)
    serving = Serving(
        args.host,
        args.port,
        args.replicas,
        args.device,
        args.max_body,
        args.concurrency,
        args.timeout,
        args.max_batch_size,
        args.batch_timeout,
        python,
    )
    argv = [*engine.serve(package, serving), *(["--json"] if args.json else [])]
    if not args.dry_run:
        shell.become(argv)
    if args.json:
        output.emit({"package": str(package), "command": argv})
    else:
        if not package.exists():
            output.note("would package the model first")
        output.say(shell.command(*argv))
    return 0


def _refuse(args: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """Raise UsageError for options that do not apply to the backend."""
    for name, value in defaults.items():
        if getattr(args, name.replace("-", "_")) != value:
            option = "--for" if name == "lifetime" else f"--{name}"
            raise UsageError(f"{option} does not apply to backend {args.backend}")


def package_of(args: argparse.Namespace, *, write: bool) -> tuple[Path, str]:
    """The package, which `write` makes for a run, and the Python that loads it."""
    folder = Path(args.model or "")
    if args.model and (folder / run_export.MANIFEST).is_file():
        if args.checkpoint or args.inference:
            hint = "name a run, or pass them to `deploykit export`"
            raise UsageError("--checkpoint and --inference do not apply to a package", hint=hint)
        deployments.origin(folder)
        return folder.absolute(), args.python or sys.executable
    if _is_folder(args.model):
        raise NotFound(
            f"{folder} is not a package: {run_export.MANIFEST} is missing",
            hint="create one with `deploykit export RUN --to FOLDER`",
        )
    row = registry.get(args.model)
    prepared = run_export.in_run_folder(
        row, checkpoint=args.checkpoint, inference=args.inference, python=args.python
    )
    if prepared.inference and not args.inference:
        output.note("using the inference.py of the last deploy; --inference FILE chooses another")
    if write:
        with watching():
            prepared.write_once()
    return Path(prepared.to), prepared.python


def _is_folder(model: str | None) -> bool:
    """Return True for a package folder, False for a run or a folder that `fetch` filled.

    Raises NotFound for a path without a folder.
    """
    folder = Path(model or "")
    if model and ("/" in model or model.endswith(".tar.gz")) and not folder.is_dir():
        elsewhere = folder.exists() or paths.is_address(model)
        what = "is not a folder on this machine" if elsewhere else "does not exist"
        packages = (str(each.parent) for each in folder.parent.glob(f"*/{run_export.MANIFEST}"))
        near = did_you_mean(str(folder), packages)
        hint = near or "expected a run, or a package made by `deploykit export RUN --to FOLDER`"
        raise NotFound(f"{model} {what}", hint=hint)
    return bool(model) and folder.is_dir() and not fetch.is_target(folder)


def _deploy(args: argparse.Namespace) -> int:
    """Deploy to an endpoint, or start a batch job."""
    overrides = list(args.set)
    if args.name is not None:
        overrides.append(Option("--name", f"{args.backend}.deploy.name={args.name}"))
    if args.lifetime is not None:
        overrides.append(Option("--for", f"{args.backend}.deploy.delete_after={args.lifetime}"))
    if args.max_cost is not None:
        overrides.append(Option("--max-cost", f"max_cost={args.max_cost}"))
    if _is_folder(args.model):
        packed = deployments.package(package_of(args, write=True)[0])
        row = registry.lookup(packed.run).get(packed.run)
        settings = deployments.settings(args.backend, args.job, row, overrides)
    else:
        row = registry.get(args.model)
        settings = deployments.settings(args.backend, args.job, row, overrides)
        packed = deployments.package(package_of(args, write=True)[0])
    output.warnings(settings.check(packed))
    plan = deployments.prepare(settings, packed, update=args.update, ask=not args.dry_run)
    output.warnings(settings.check_cost(plan))
    if args.dry_run:
        _show(plan, as_json=args.json)
        return 0
    output.note(plan.summary, *_cost_lines(plan))
    with watching():
        deployed = deployments.deploy(plan, update=args.update)
    if args.wait or deployed.pending:
        deployed = endpoint.wait_for(deployed, None)
    return _report(deployed, as_json=args.json)


def _cost_lines(plan: DeploymentPlan) -> list[str]:
    """What the endpoint costs, and whether it ends."""
    lines = [plan.cost, *(f"warning: {text}" for text in plan.estimate.warnings)]
    until = plan.settings.get("until")
    if until is not None:
        lines.append(f"scheduled for deletion at {output.when(until)}")
    elif plan.mode != "batch":
        lines.append("the endpoint runs until you delete it; --for 8h schedules its deletion")
    return lines


def _show(plan: DeploymentPlan, *, as_json: bool) -> None:
    if not as_json:
        uploads = f"uploads {plan.package.folder} to {plan.archive}"
        output.note(plan.summary, *_cost_lines(plan), uploads)
        output.block(plan.text)
        return
    output.emit(
        {
            "name": plan.name,
            "backend": plan.backend,
            "target": plan.target,
            "account": plan.account,
            "mode": plan.mode,
            "run": plan.package.run,
            "archive": plan.archive,
            "machines": [each._asdict() for each in plan.machines],
            "cost": plan.estimate.data(),
            "until": plan.settings.get("until"),
            "requests": plan.data,
        }
    )


def _report(row: Deployment, *, as_json: bool) -> int:
    if as_json:
        output.emit(endpoint.data(row))
    else:
        endpoint.say(row)
        if not row.is_batch:
            output.note(
                f"call it: {shell.command('deploykit', 'endpoint', 'invoke', row.name)} FILE"
            )
            output.note(f"delete it: {shell.command('deploykit', 'endpoint', 'rm', row.name)}")
    return endpoint.exit_code(row)
