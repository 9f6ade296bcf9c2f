"""Estimate when a job would start, earliest option first. Submits nothing.

On Slurm, each partition is an option, and the times are the scheduler's current estimates (`sbatch
--test-only`); they change when jobs end early or jobs with a higher priority arrive. SageMaker
gives no start times; its quotas and recent spot prices are shown instead. Without --backend, covers
the file's `backend` and every backend with a section in it, else the default backend.

deploykit when job.yaml
deploykit when --pick                 write the earliest choice into the job file
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.backends import base as backend
from deploykit.backends.base import Start
from deploykit.cli import output
from deploykit.cost.estimate import Estimate
from deploykit.job import file as jobfile
from deploykit.job.model import Plan
from deploykit.lib import units
from deploykit.lib.errors import NeverStarts, UsageError
from deploykit.run import lifecycle, registry

SHARED = ("job", "only_backend")


class _Choice(NamedTuple):
    """Where a job could run, when, and at which cost."""

    start: Start
    cost: Estimate | None

    def order(self, now: float) -> tuple[bool, bool, float, float, bool]:
        """The earliest first, by minutes; then the cheapest, then what the job names itself."""
        at, worst = self.start.at, self.cost and self.cost.amount("worst")
        minutes = max(0.0, at.timestamp() - now) // 60 if at else 0.0
        price = float(worst or 0)
        return not self.start.possible, at is None, minutes, price, bool(self.start.settings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pick", action="store_true", help="write the earliest choice into the job file"
    )


def run(args: argparse.Namespace) -> int:
    """Print where the job could run; 81 where it could start nowhere."""
    now = registry.now()
    names = [args.backend] if args.backend else lifecycle.named(args.job, args.set)
    if args.pick and len(names) > 1:
        raise UsageError(
            f"--pick requires one backend, but the job names {', '.join(names)}",
            hint="choose one with -b",
        )
    choices = {name: _choices(name, args, now) for name in names}
    records = [
        {"backend": name, "starts": [_data(one) for one in own]} for name, own in choices.items()
    ]
    every = sorted((one for own in choices.values() for one in own), key=lambda one: one.order(now))
    if args.json:
        output.emit(records[0] if len(records) == 1 else {"backends": records})
    else:
        _show(every)
    best = next((one.start for one in every if one.start.possible), None)
    if best is None:
        return NeverStarts.exit_code
    if args.pick:
        _pick(args.job, best)
    return 0


def _choices(name: str, args: argparse.Namespace, now: float) -> list[_Choice]:
    """Where the job could run on one backend, the best first."""
    prepared = lifecycle.prepare(args.job, args.set, name, None, args.arguments)
    output.warnings(prepared.warnings)
    engine = backend.require(name, "when")
    choices = [_priced(prepared.plan, one) for one in engine.when(prepared.plan)]
    return sorted(choices, key=lambda one: one.order(now))


def _priced(plan: Plan, start: Start) -> _Choice:
    engine = backend.find(plan.backend)
    return _Choice(start, lifecycle.estimate(engine, plan.job, start.options))


def _data(one: _Choice) -> dict[str, Any]:
    start = one.start
    return {
        "where": start.where,
        "possible": start.possible,
        "start": start.at and output.when(start.at.timestamp()),
        "seconds": start.at and round(max(0.0, start.at.timestamp() - registry.now())),
        "reason": start.reason,
        "settings": dict(start.settings),
        "cost": one.cost and one.cost.data(),
    }


def _show(choices: Sequence[_Choice]) -> None:
    headings = ["where", "starts", "in", "worst cost", "details"]
    output.table(headings, [_row(one) for one in choices])


def _row(one: _Choice) -> list[str]:
    start = one.start
    at, left = "-", "-"
    if start.at is not None:
        seconds = start.at.timestamp() - registry.now()
        at, left = output.when(start.at.timestamp()), "now" if seconds < 1 else units.span(seconds)
    return [start.where, at, left, one.cost.text("worst") if one.cost else "-", start.reason]


def _pick(job: Path, start: Start) -> None:
    """Write what chooses a start into the job file. Raises UsageError where that fails."""
    if not start.settings:
        output.note(f"{start.where}: no change needed, because the job already starts there")
        return
    if start.at is None:
        output.note(f"{start.where}: no start time is known, so nothing was changed")
        return
    if not job.exists() or job.suffix == ".py":
        hint = " ".join(f"--set {key}={value}" for key, value in start.settings.items())
        raise UsageError(f"--pick requires a job file, and {job} is not one", hint=hint)
    for key, value in start.settings.items():
        jobfile.set_key(job, key, value)
        output.note(f"{job}: {key} is {value}")
