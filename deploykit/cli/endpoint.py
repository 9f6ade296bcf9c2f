"""Show, call, change and delete the endpoints and batch jobs that `deploykit deploy` created.

deploykit endpoint                           list all of them
deploykit endpoint status NAME               show one, with its variants and history
deploykit endpoint logs NAME --follow        follow the logs of all instances
deploykit endpoint wait NAME                 wait until it is in service, or its batch job has ended
deploykit endpoint invoke NAME FILE          send one request; without FILE, from standard input
deploykit endpoint scale NAME --instances 2  or --min and --max for autoscaling, or --weight
deploykit endpoint rollback NAME             return to the previous deployment
deploykit endpoint rm NAME                   delete it, with its configurations and models

To change the model or the settings, deploy again.
"""

from __future__ import annotations

import argparse
import mimetypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.backends.deployment import Condition, Deployment, Machines, Phase, Scale
from deploykit.cli import arguments, output
from deploykit.job.spelling import did_you_mean
from deploykit.lib import shell, units
from deploykit.lib.errors import NotFound, RunFailed, UsageError
from deploykit.run import deployments, registry

_TYPES = {
    ".json": "application/json",
    ".jsonl": "application/jsonlines",
    ".npy": "application/x-npy",
}
"""Suffix of a file -> MIME type, where Python does not know it."""
_ONLY = {
    "follow": ("logs",),
    "timeout": ("wait", "invoke"),
    "content_type": ("invoke",),
    "accept": ("invoke",),
    "variant": ("invoke",),
    "output": ("invoke",),
    "no_wait": ("invoke",),
    "instances": ("scale",),
    "min": ("scale",),
    "max": ("scale",),
    "weight": ("scale",),
    "to": ("rollback",),
}
"""Options of certain actions only."""
_OTHER_NAMES = {
    **dict.fromkeys(("list", "ls", "show", "describe"), "status"),
    **dict.fromkeys(("delete", "remove"), "rm"),
    **dict.fromkeys(("call", "ask"), "invoke"),
    "undo": "rollback",
}
"""Actions of similar programs, and the action here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        default="status",
        metavar="ACTION",
        help=f"{', '.join(_ACTIONS)} (default: status)",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="endpoint or batch job; TARGET/NAME if several targets use the name",
    )
    parser.add_argument(
        *("-f", "--follow"), action="store_true", help="logs: keep printing new lines"
    )
    parser.add_argument(
        "--timeout",
        type=arguments.seconds,
        metavar="TIME",
        help="wait: maximum time to wait; invoke: maximum time to wait for an asynchronous "
        "response",
    )
    _add_for_invoke(parser)
    parser.add_argument(
        "--instances", type=arguments.count, metavar="N", help="scale: number of instances"
    )
    parser.add_argument(
        "--min",
        type=_number,
        metavar="N",
        help="scale: minimum number of instances for autoscaling",
    )
    parser.add_argument(
        "--max",
        type=arguments.count,
        metavar="N",
        help="scale: maximum number of instances for autoscaling",
    )
    parser.add_argument(
        "--weight",
        action="append",
        type=_weight,
        metavar="VARIANT=N",
        help="scale: traffic weight of a variant (repeatable)",
    )
    parser.add_argument(
        "--to", metavar="CONFIG", help="rollback: configuration to return to; `status` lists them"
    )


def _add_for_invoke(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--content-type",
        metavar="TYPE",
        help="invoke: MIME type of the request (default: from the file name)",
    )
    parser.add_argument(
        "--accept",
        metavar="TYPE",
        help="invoke: MIME type of the response (default: application/json)",
    )
    parser.add_argument("--variant", metavar="NAME", help="invoke: variant to call")
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="FILE",
        help="invoke: write the response to this file",
    )
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="invoke: print the location of an asynchronous response without waiting for it",
    )


def _number(text: str) -> int:
    return 0 if text == "0" else arguments.count(text)


def _weight(text: str) -> tuple[str, int]:
    name, _, weight = text.partition("=")
    if not name or not weight.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not VARIANT=N, such as new=1")
    return name, int(weight[:18])


def run(args: argparse.Namespace) -> int:
    if args.action not in _ACTIONS:
        meant = _OTHER_NAMES.get(args.action)
        hint = f"did you mean {meant!r}?" if meant else did_you_mean(args.action, _ACTIONS)
        hint = hint or f"actions: {', '.join(_ACTIONS)}"
        raise UsageError(f"unknown action {args.action!r}", hint=hint)
    for name, actions in _ONLY.items():
        if args.action not in actions and getattr(args, name) not in (None, False):
            known = " and ".join(f"`deploykit endpoint {action}`" for action in actions)
            raise UsageError(f"--{name.replace('_', '-')} applies only to {known}")
    return _ACTIONS[args.action](args)


def _one(args: argparse.Namespace) -> Deployment:
    """The endpoint that an action names. Raises UsageError unless there is one name."""
    if len(args.names) != 1:
        known = [row.name for row in deployments.current()]
        hint = f"endpoints: {', '.join(known)}" if known else deployments.NO_ENDPOINT
        raise UsageError(f"`deploykit endpoint {args.action}` expects one name", hint=hint)
    return deployments.get(args.names[0])


def _status(args: argparse.Namespace) -> int:
    known = [deployments.get(name) for name in args.names] or deployments.current()
    conditions = deployments.with_conditions(known)
    rows = [row for row, _ in conditions]
    if args.json:
        output.emit([data(row) | {"history": _history(row)} for row in rows])
    elif not args.names:
        _table(rows)
    else:
        for row, condition in conditions:
            _details(row, condition)
    return 0


def _table(rows: list[Deployment]) -> None:
    if not rows:
        output.note("no endpoints yet; `deploykit deploy RUN -b BACKEND` creates one")
        return
    output.table(
        ["name", "state", "mode", "run", "machines", "where", "created"],
        [
            [
                *(row.name, row.phase, row.mode, row.run, _machines(row)),
                *(f"{row.target} ({row.account})", output.when(row.created)),
            ]
            for row in rows
        ],
    )


def _details(row: Deployment, condition: Condition) -> None:
    say(row)
    output.say(f"  {row.mode} in {row.target}, account {row.account}: {_machines(row)}")
    output.say(*(f"  variant {name}: {text}" for name, text in condition.details.items() if text))
    for each in deployments.history(row.backend, row.target, row.account, row.name):
        mark = "*" if each == row else " "
        when = output.when(each.activated)
        output.say(f"  {mark} {each.config}  {when}  {each.phase}  {each.run}, model {each.model}")


def _history(row: Deployment) -> list[dict[str, Any]]:
    rows = deployments.history(row.backend, row.target, row.account, row.name)
    names = ("config", "model", "run", "package", "phase", "created", "activated")
    return [{name: getattr(each, name) for name in names} for each in rows]


def say(row: Deployment) -> None:
    """Print the state of an endpoint, and the reason."""
    reason = f" - {row.reason}" if row.reason else ""
    left = ""
    if row.phase == Phase.DELETED.value:
        left = f"; `deploykit endpoint rm {row.name}` deletes its configuration and model"
    output.say(f"{row.name}: {row.phase}, with the model of {row.run}{reason}{left}")


def _machines(row: Deployment) -> str:
    return " + ".join(map(machine, row.machine_list))


def machine(one: Machines) -> str:
    """The machines of a variant, in a few words."""
    if not one.instance_type:
        return f"{one.memory // 1024} GB of memory"
    most = f" to {one.most}" if one.most > one.instances else ""
    return f"{one.instances}{most} x {one.instance_type}"


def data(row: Deployment) -> dict[str, Any]:
    """An endpoint as JSON."""
    names = (
        *("name", "config", "backend", "target", "account", "mode", "run", "model", "package"),
        *("archive", "created", "activated", "phase", "native", "reason", "ended"),
    )
    values = {name: getattr(row, name) for name in names}
    return values | {"machines": [each._asdict() for each in row.machine_list]}


def exit_code(row: Deployment) -> int:
    """0 unless the endpoint or batch job has failed."""
    return RunFailed.exit_code if row.phase in {Phase.FAILED.value, Phase.STOPPED.value} else 0


def _logs(args: argparse.Namespace) -> int:
    row = _one(args)
    lines = backend.require(row.backend, "endpoint_logs").endpoint_logs(row, follow=args.follow)
    if args.json:
        output.log_data(lines)
    else:
        output.log(lines)
    return 0


def _wait(args: argparse.Namespace) -> int:
    row = wait_for(_one(args), args.timeout)
    if args.json:
        output.emit(data(row))
    else:
        say(row)
    return exit_code(row)


def wait_for(row: Deployment, timeout: float | None) -> Deployment:
    """Wait until an endpoint is in service or has failed, and note each new state."""
    latest, noted, began = row, "", registry.now()

    def now() -> str:
        return f"{latest.name}: {latest.phase}, {units.span(registry.now() - began)}"

    with output.last_line(now):
        for latest in deployments.settled(row, timeout):
            if latest.phase != noted and not Phase(latest.phase).settled:
                output.note(f"{latest.name}: {latest.phase}")
            noted = latest.phase
    return latest


def _invoke(args: argparse.Namespace) -> int:
    name, *files = args.names or [""]
    args.names = [name] if name else []
    row = _one(args)
    if len(files) > 1:
        raise UsageError("expected only one file", hint="deploykit endpoint invoke NAME FILE")
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise NotFound(f"cannot write {args.output}: its folder does not exist")
    body, suffix = _body(files[0] if files else "-")
    engine = backend.require(row.backend, "invoke")
    timeout = None if args.no_wait else args.timeout or float("inf")
    answer, kind = engine.invoke(
        row,
        body,
        content_type=args.content_type or _type(suffix),
        accept=args.accept or "application/json",
        variant=args.variant or "",
        timeout=timeout,
    )
    if args.output is not None:
        args.output.write_bytes(answer)
        output.note(f"wrote {units.size(len(answer))} of {kind or 'text'} to {args.output}")
    elif args.json:
        output.emit({"content_type": kind, "body": answer.decode(errors="replace")})
    else:
        output.raw(answer)
    return 0


def _body(file: str) -> tuple[bytes, str]:
    """The body of a request, and the suffix of its file."""
    if file == "-":
        if sys.stdin.isatty():
            output.note("reading the request from standard input; end it with Ctrl-D")
        return sys.stdin.buffer.read(), ""
    try:
        return Path(file).read_bytes(), Path(file).suffix
    except OSError as error:
        raise NotFound(f"cannot read {file}: {error.strerror}") from error


def _type(suffix: str) -> str:
    return _TYPES.get(suffix) or mimetypes.types_map.get(suffix) or "application/json"


def _scale(args: argparse.Namespace) -> int:
    row = _one(args)
    wanted = Scale(args.instances, args.min, args.max, dict(args.weight or ()))
    if wanted == Scale():
        hint = "set --instances N, --min N, --max N or --weight VARIANT=N"
        raise UsageError("nothing to change", hint=hint)
    plan = deployments.plan_scale(row, wanted)
    if list(plan.machines) != row.machine_list:
        output.note(plan.cost)
    row = deployments.scale(row, wanted)
    if args.json:
        output.emit(data(row))
    else:
        output.say(f"{row.name}: updated; {_machines(row)}")
    return 0


def _rollback(args: argparse.Namespace) -> int:
    row = _one(args)
    chosen, plan = deployments.plan_rollback(row, args.to)
    change = f"from {row.config} to {chosen.config}, with the model of {chosen.run}"
    output.note(f"{row.name}: {change}", plan.cost)
    row = deployments.rollback(row, chosen.config)
    if args.json:
        output.emit(data(row))
    else:
        say(row)
        output.note(f"`deploykit endpoint wait {row.name}` waits until the endpoint is in service")
    return 0


def _rm(args: argparse.Namespace) -> int:
    if not args.names:
        _one(args)
    removed = []
    for row in [deployments.get(name) for name in dict.fromkeys(args.names)]:
        gone = deployments.remove(row)
        removed.append(data(gone[0]) | {"left": sorted({each.archive for each in gone})})
        if not args.json:
            output.say(f"{row.name}: {'stopped' if row.is_batch else 'deleted'}")
            for archive in removed[-1]["left"]:
                output.say(f"  left    {archive}: {shell.command('aws', 's3', 'rm', archive)}")
    if args.json:
        output.emit(removed)
    return 0


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "status": _status,
    "logs": _logs,
    "wait": _wait,
    "invoke": _invoke,
    "scale": _scale,
    "rollback": _rollback,
    "rm": _rm,
}
