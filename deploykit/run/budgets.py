"""Budgets: what runs have cost and may still cost together, in a table of the registry's file.

A run is entered before it is sent, at its worst case, in the transaction that finds room for it, so
that two submits at once cannot share the same money. After its end it counts at its actual cost,
also after it was removed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.backends import base as backend
from deploykit.cost import cap, money, prices
from deploykit.cost.cap import Budget
from deploykit.cost.estimate import Estimate
from deploykit.job.model import Plan, State
from deploykit.lib import units
from deploykit.lib.errors import UsageError
from deploykit.run import registry
from deploykit.run.registry import Run

_TABLE = """
CREATE TABLE IF NOT EXISTS budget_runs (
    run      TEXT PRIMARY KEY,
    name     TEXT NOT NULL,  -- of the budget
    budget   TEXT NOT NULL,  -- as the job had it
    created  REAL NOT NULL,  -- seconds since the epoch
    ended    REAL,
    currency TEXT NOT NULL,
    worst    TEXT NOT NULL,  -- what the run may cost
    cost     TEXT            -- what it has cost, once that is known
)
"""


class Use(NamedTuple):
    """The use of a budget."""

    budget: Budget
    spent: Decimal
    """By runs that have ended."""
    reserved: Decimal
    """By unfinished runs, at their worst."""
    runs: int
    """The number of unfinished runs."""

    @property
    def left(self) -> Decimal:
        """The amount that other runs may cost."""
        return self.budget.limit.amount - self.spent - self.reserved

    def __str__(self) -> str:
        currency = self.budget.limit.currency
        parts = [f"{money.text(self.spent, currency)} spent"]
        if self.runs:
            held = money.text(self.reserved, currency)
            parts.append(f"{held} reserved for {units.plural(self.runs, 'unfinished run')}")
        return f"budget {self.budget}: {money.text(self.left, currency)} left; {', '.join(parts)}"

    def data(self) -> dict[str, Any]:
        """The same as JSON."""
        amounts = {"spent": self.spent, "reserved": self.reserved, "left": self.left}
        return {
            "budget": str(self.budget),
            "name": self.budget.name,
            "currency": self.budget.limit.currency,
            **{key: float(money.cents(amount)) for key, amount in amounts.items()},
            "runs": self.runs,
        }


def reserve(
    plan: Plan, estimate: Estimate | None, refresh: Callable[[Sequence[Run]], object]
) -> None:
    """Enter a run into the budget of its job, at its worst case.

    `refresh` updates the states of runs that may have ended. Raises UsageError if the run could
    exceed the budget.
    """
    amount = None if estimate is None else cap.worst(plan.job, estimate)
    if plan.job.budget is None or amount is None:
        return  # nothing is billed: `cap.problems` refuses an unknown price
    limit = cap.parse_budget(plan.job.budget)
    if _enter(plan, limit, amount) is None:
        return
    refresh(_open(limit.name))
    use = _enter(plan, limit, amount)
    if use is not None:
        may = money.text(amount, limit.limit.currency)
        raise UsageError(
            f"the job may cost {may}, more than its budget has left: {use}",
            hint="wait for runs to end, raise the budget, or lower the time limit or the restarts",
        )


def _enter(plan: Plan, limit: Budget, amount: Decimal) -> Use | None:
    """Enter a run if there is room for it; else return the use of the budget."""
    with registry.writing() as database:
        database.execute(_TABLE)
        rows = [dict(row) for row in database.execute(*_of(limit.name)) if row["run"] != plan.run]
        use = _use(limit, _settled(rows, database))
        if amount > use.left:
            return use
        database.execute(
            "INSERT OR REPLACE INTO budget_runs VALUES (?, ?, ?, ?, NULL, ?, ?, NULL)",
            (
                plan.run,
                limit.name,
                str(plan.job.budget),
                registry.now(),
                limit.limit.currency,
                str(amount),
            ),
        )
    return None


def settle(row: Run) -> None:
    """Record what a run has cost, before it is removed."""
    if _exists() and registry.query([("SELECT 1 FROM budget_runs WHERE run = ?", [row.run])]):
        with registry.writing() as database:
            _close(database, row)


def uses() -> list[Use]:
    """The use of each budget, by name, as the newest run under it had it."""
    if not _exists():
        return []
    newest: dict[str, str] = {}
    for row in registry.query([("SELECT name, budget FROM budget_runs ORDER BY created", [])]):
        newest[row["name"]] = row["budget"]
    return [of(text) for _, text in sorted(newest.items())]


def of(written: str) -> Use:
    """The use of a budget as it is written in a job."""
    limit = cap.parse_budget(written)
    rows = [dict(row) for row in registry.query([_of(limit.name)])] if _exists() else []
    return _use(limit, _settled(rows, None))


def _exists() -> bool:
    return bool(registry.query([("SELECT 1 FROM sqlite_master WHERE name = 'budget_runs'", [])]))


def _of(name: str) -> tuple[str, list[str]]:
    return "SELECT * FROM budget_runs WHERE name = ?", [name]


def _open(name: str) -> list[Run]:
    """The runs under a budget whose cost is not known yet."""
    condition = "run IN (SELECT run FROM budget_runs WHERE name = ? AND cost IS NULL)"
    return registry.select(condition, [name])


def _settled(
    rows: Sequence[dict[str, Any]], database: sqlite3.Connection | None
) -> list[Mapping[str, Any]]:
    """The rows with the cost of runs that have ended since; stored if there is a `database`."""
    known = registry.lookup(*(row["run"] for row in rows if row["cost"] is None))
    settled: list[Mapping[str, Any]] = []
    for row in rows:
        run = known.get(row["run"])
        if run is not None and State(run.state).final and not registry.may_still_come(run):
            settled.append({**row, "cost": str(_cost(run, row["worst"])), "ended": _end(run)})
            if database is not None:
                _close(database, run)
        else:
            settled.append(row)
    return settled


def _close(database: sqlite3.Connection, run: Run) -> None:
    query = "SELECT worst FROM budget_runs WHERE run = ? AND cost IS NULL"
    for row in database.execute(query, (run.run,)).fetchall():
        database.execute(
            "UPDATE budget_runs SET cost = ?, ended = ? WHERE run = ?",
            (str(_cost(run, row["worst"])), _end(run), run.run),
        )


def _end(run: Run) -> float:
    return run.finished or registry.now()


def _cost(run: Run, worst: str) -> Decimal:
    """What a run that has ended has cost; its worst case if that is unknown."""
    if run.state == State.UNSENT.value:
        return Decimal(0)
    known = prices.spent(Path(run.folder, backend.PRICE), run.billed)
    return Decimal(worst) if known is None else known.amount


def _use(limit: Budget, rows: Sequence[Mapping[str, Any]]) -> Use:
    now = datetime.now(UTC)
    start = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
    if limit.monthly:
        rows = [row for row in rows if row["ended"] is None or row["ended"] >= start]
    over = [row for row in rows if row["cost"] is not None]
    held = [row for row in rows if row["cost"] is None]
    return Use(
        limit,
        sum((Decimal(row["cost"]) for row in over), Decimal(0)),
        sum((Decimal(row["worst"]) for row in held), Decimal(0)),
        len(held),
    )
