"""List runs, newest first, with their current state; or endpoints, with their cost.

With --endpoints, lists the endpoints that deploykit created, including those created from other
machines, in each region to which you have deployed and in AWS_REGION. The cost so far assumes that
the current number of machines ran the whole time.

deploykit list --state failed            only failed runs
deploykit list --name 'exp-*' -n 100     up to 100 runs whose ids start with exp-
deploykit list --endpoints               endpoints: age, price, last request
deploykit list --format '{run} {reason}'
"""

from __future__ import annotations

import argparse
from decimal import Decimal
from pathlib import Path
from typing import Any

from deploykit.backends.deployment import Billed
from deploykit.cli import describe, endpoint, output, query
from deploykit.cost import money
from deploykit.job import file as jobfile
from deploykit.job.model import State
from deploykit.job.spelling import did_you_mean
from deploykit.lib import units
from deploykit.lib.errors import UsageError
from deploykit.run import budgets, deployments, registry
from deploykit.run import state as run_state
from deploykit.run.registry import Run, Search

SHARED = ("limit", "query")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cost", action="store_true", help="also show the cost of each run")
    parser.add_argument("--endpoints", action="store_true", help="list endpoints instead of runs")
    parser.add_argument(
        "--state",
        action="append",
        metavar="STATE",
        help="show only runs in this state (repeatable): "
        f"{', '.join(state.value for state in State)}",
    )
    parser.add_argument(
        "--name",
        metavar="PATTERN",
        help="show only runs whose id contains this text or matches this pattern, such as 'exp-*'",
    )


def run(args: argparse.Namespace) -> int:
    if args.endpoints:
        return _endpoints(args)
    search = Search(_states(args.state or []), args.name)
    rows = run_state.search(search, args.limit, run_state.PATIENCE)
    if query.is_data(args):
        records = [describe.run_data(row) for row in rows]
        query.emit(args, records, records)
    elif rows:
        cost = ["cost"] if args.cost else []
        output.table(
            ["run", "backend", "state", "started (UTC)", "duration", "age", *cost, "reason"],
            [_cells(row, cost=args.cost) for row in rows],
            optional=("started (UTC)", "backend", "duration"),
        )
    elif every := registry.count():
        output.note(f"no matches among {units.plural(every, 'run')}")
    else:
        output.note(f"no runs yet; {_how_to_start()}")
    if args.cost and not query.is_data(args):
        output.note(*_budget_lines())
    if rows and len(rows) < (total := search.count()):
        output.note(f"showing the newest {len(rows)} of {total} runs; -n {total} shows all")
    return 0


def _endpoints(args: argparse.Namespace) -> int:
    """List the endpoints; return the exit code of the first location that could not be asked."""
    if args.state or args.name or args.cost:
        raise UsageError("--endpoints cannot be combined with --state, --name or --cost")
    every, errors = deployments.billed()
    endpoints = every[: args.limit]
    if query.is_data(args):
        records = [_endpoint_data(one) for one in endpoints]
        query.emit(args, records, records)
    elif endpoints:
        output.table(
            [
                "endpoint",
                "state",
                "run",
                "machines",
                "age",
                "per hour",
                "so far",
                "used",
                "deleted",
            ],
            [_endpoint_cells(one) for one in endpoints],
            optional=("run", "machines", "state"),
        )
    elif not errors:
        output.note("no endpoints yet; `deploykit deploy RUN -b BACKEND` creates one")
    if len(endpoints) < len(every):
        output.note(
            f"showing the newest {len(endpoints)} of {len(every)} endpoints; -n {len(every)} shows "
            "all"
        )
    for error in errors:
        output.error(error, as_json=False)
    if not query.is_data(args):
        output.note(*_budget_lines())
    return errors[0].exit_code if errors else 0


def _budget_lines() -> list[str]:
    """A line for each budget, with what is left; first asks about endpoints past their time."""
    deployments.ask_overdue()
    return [str(use) for use in budgets.uses()]


def _so_far(one: Billed) -> Decimal | None:
    if one.hourly is None or not one.hourly:  # unknown, or billed by use
        return None
    return money.for_seconds(one.hourly, Decimal(max(0.0, registry.now() - one.created)))


def _endpoint_data(one: Billed) -> dict[str, Any]:
    cost = _so_far(one)
    return {
        **one._asdict(),
        "machines": [each._asdict() for each in one.machines],
        "hourly": None if one.hourly is None else money.exact(one.hourly),
        "cost": None if cost is None else float(money.cents(cost)),
    }


def _endpoint_cells(one: Billed) -> list[str]:
    at, cost = registry.now(), _so_far(one)
    price = "unknown" if one.hourly is None else f"{money.exact(one.hourly)} {one.currency}"
    if one.hourly is not None and not one.hourly:
        price = "per use"
    used = "unknown"
    if one.used is not None:
        used = f"{units.span(at - one.used)} ago"
    elif one.used_days is not None:
        is_young = at - one.created < one.used_days * 86400
        used = "never" if is_young else f"not in the last {one.used_days} days"
    deleted = "unknown"
    if one.until_known:
        deleted = "-" if one.until is None else f"in {units.span(max(0.0, one.until - at))}"
    return [
        *(one.name, one.native, one.run or "-", " + ".join(map(endpoint.machine, one.machines))),
        *(units.span(at - one.created), price),
        *("unknown" if cost is None else money.text(cost, one.currency), used, deleted),
    ]


def _how_to_start() -> str:
    if Path(jobfile.DEFAULT).exists():
        return "`deploykit submit` starts one"
    return "`deploykit init` writes a job file, then `deploykit submit` starts one"


def _states(names: list[str]) -> set[str]:
    """Return the states to show; empty for all. Raises UsageError for an unknown state."""
    known = [state.value for state in State]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"states: {', '.join(known)}"
            raise UsageError(f"unknown state {name!r}", hint=hint)
    return set(names)


def _cells(row: Run, *, cost: bool) -> list[str]:
    at = registry.now()
    started = "-" if row.started is None else output.when(row.started)[:16].replace("T", " ")
    duration, age = units.span(row.seconds(at)), units.span(at - row.created)
    paid = [_paid(row)] if cost else []
    return [row.run, row.backend, row.state, started, duration, age, *paid, row.reason]


def _paid(row: Run) -> str:
    return describe.cost(row, brief=True) or "-"
