"""List runs, the newest first, with their current state.

deploykit list --state failed            only failed runs
deploykit list --name 'exp-*' -n 100     up to 100 runs whose ids start with exp-
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploykit.cli import describe, output
from deploykit.job import file as jobfile
from deploykit.job.model import State
from deploykit.job.spelling import did_you_mean
from deploykit.lib import units
from deploykit.lib.errors import UsageError
from deploykit.run import registry
from deploykit.run import state as run_state
from deploykit.run.registry import Run, Search

SHARED = ("limit",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cost", action="store_true", help="also show what each run has cost")
    parser.add_argument(
        "--state",
        action="append",
        metavar="STATE",
        help=f"only runs in this state (repeatable): {', '.join(state.value for state in State)}",
    )
    parser.add_argument(
        "--name",
        metavar="PATTERN",
        help="only runs whose id contains this, or matches it: 'exp-*' with *, ? and [...]",
    )


def run(args: argparse.Namespace) -> int:
    search = Search(_states(args.state or []), args.name)
    rows = run_state.search(search, args.limit)
    if args.json:
        output.emit([describe.run_data(row) for row in rows])
    elif rows:
        cost = ["cost"] if args.cost else []
        output.table(
            ["run", "backend", "state", "started (UTC)", "duration", "age", *cost, "reason"],
            [_cells(row, cost=args.cost) for row in rows],
            optional=("started (UTC)", "backend", "duration"),
        )
    elif every := registry.count():
        output.note(f"no match among {units.plural(every, 'run')}")
    else:
        output.note(f"no runs yet; {_how_to_start()}")
    if args.cost and not args.json:
        output.note(*describe.budget_lines())
    if rows and len(rows) < (total := search.count()):
        output.note(f"the newest {len(rows)} of {total} runs; all: -n {total}")
    return 0


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
