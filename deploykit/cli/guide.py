"""Print a troubleshooting guide, filled in with the values of a run or a job file.

Without NAME, lists the guides. With a run, the guide shows what the launchers logged about each
node; with --job, what `doctor` finds about the job's network. Otherwise, it contains placeholders.

deploykit guide nccl exp-1
deploykit guide security-groups --job job.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.cli import output
from deploykit.diagnose import guides
from deploykit.diagnose.guides import GUIDES, GuideContext
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import BackendUnavailable, TryAgain, UsageError
from deploykit.lib.finding import Finding, Fix
from deploykit.run import lifecycle, registry
from deploykit.run import state as run_state

_NETWORK = (
    *("acl_", "efa_", "encryption_", "group_", "peers_", "s3_outbound", "subnet_"),
    *("endpoint_", "s3_route", "vpc_dns", "credentials"),
)
"""Beginnings of the codes of doctor's findings that the guides show."""
_KEYS = ("region", "instance_type", "subnets", "security_group_ids")
SHARED = ("set",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(GUIDES))
    parser.add_argument("run", nargs="?", metavar="RUN", help="fill in the values of this run")
    parser.add_argument("--job", type=Path, metavar="FILE", help="check the network of this job")
    parser.add_argument(
        "--from",
        type=Path,
        dest="saved",
        metavar="FOLDER",
        help="use facts saved by `doctor --save`",
    )


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        _list(as_json=args.json)
        return 0
    if args.name not in GUIDES:
        hint = did_you_mean(args.name, GUIDES) or f"guides: {', '.join(GUIDES)}"
        raise UsageError(f"unknown guide {args.name!r}", hint=hint)
    context = GuideContext()
    if args.run is not None:
        _add_run(context, args.run)
    if args.job is not None:
        _add_job(context, args)
    page = guides.page(args.name, context)
    if args.json:
        output.emit({"guide": args.name, "markdown": page})
    else:
        output.block(page)
    return 0


def _list(*, as_json: bool) -> None:
    if as_json:
        output.emit([{"name": name, "symptom": guide.symptom} for name, guide in GUIDES.items()])
        return
    for name, guide in GUIDES.items():
        output.say(f"{name:<16} {guide.symptom}")


def _add_run(context: GuideContext, name: str) -> None:
    """Add the state of the run, and what its launchers logged."""
    row = run_state.refresh([registry.get(name)])[0]
    context.run, context.backend, context.job = row.run, row.backend, row.id or context.job
    context.state, context.reason = row.state, row.reason
    if row.handle is not None:
        guides.read_nodes(context, backend.find(row.backend).logs(row.handle, follow=False))


def _add_job(context: GuideContext, args: argparse.Namespace) -> None:
    """Add what doctor finds about the network of the job."""
    context.file = str(args.job)
    file = lifecycle.load(args.job, args.set, ())
    for name, options in file.sections.items():
        lifecycle.check(file, name)
        if not hasattr(options, "security_group_ids"):  # nothing of AWS's network
            continue
        context.settings = {
            key: _text(getattr(options, key)) for key in _KEYS if getattr(options, key)
        }
        if context.without_vpc:
            continue
        doctor = backend.require(name, "examine")
        try:
            findings = list(doctor.examine(file.job, options, saved=args.saved, save=None))
        except (BackendUnavailable, TryAgain) as error:
            fix = Fix(error.hint or "run this command on a machine that can reach the target")
            findings = [Finding("not_answered", "unchecked", f"not checked: {error}", (), fix)]
        context.findings += [one for one in findings if _concerns_network(one)]


def _concerns_network(one: Finding) -> bool:
    """Whether the guide shows it: what was not checked is never "nothing wrong"."""
    return one.severity == "unchecked" or one.code.startswith(_NETWORK)


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
