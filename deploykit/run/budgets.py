"""Budgets: what runs have cost and may still cost together, in a table of the registry's file.

A run is entered before it is sent, at its worst case, in the transaction that finds room for it, so
that two submits at once cannot share the same money. After its end it counts at its actual cost,
also after it was removed.
"""

from __future__ import annotations

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
_OF = "SELECT * FROM budget_runs WHERE name = ?"
_CLOSE = "UPDATE budget_runs SET cost = :cost, ended = :ended WHERE run = :run"


class Use(NamedTuple):
    budget: Budget
    spent: Decimal
    """By runs that have ended."""
    reserved: Decimal
    """By unfinished runs, at their worst."""
    runs: int

    @property
    def left(self) -> Decimal:
        return self.budget.limit.amount - self.spent - self.reserved

    def __str__(self) -> str:
        currency = self.budget.limit.currency
        parts = [f"{money.text(self.spent, currency)} spent"]
        if self.runs:
            held = money.text(self.reserved, currency)
            parts.append(f"{held} reserved for {units.plural(self.runs, 'unfinished run')}")
        return f"budget {self.budget}: {money.text(self.left, currency)} left; {', '.join(parts)}"

    def data(self) -> dict[str, Any]:
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
    is_open = "run IN (SELECT run FROM budget_runs WHERE name = ? AND cost IS NULL)"
    refresh(registry.select(is_open, [limit.name]))
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
        entered = database.execute(_OF, [limit.name]).fetchall()
        others = _settled([dict(row) for row in entered if row["run"] != plan.run])
        database.executemany(_CLOSE, [row for row in others if row["cost"] is not None])
        use = _use(limit, others)
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
    entered = _query("SELECT * FROM budget_runs WHERE run = ? AND cost IS NULL", row.run)
    if entered:
        with registry.writing() as database:
            database.executemany(_CLOSE, [_with_cost(known, row) for known in entered])


def uses() -> list[Use]:
    """The use of each budget, by name, as the newest run under it had it."""
    rows = _query("SELECT name, budget FROM budget_runs ORDER BY created")
    newest = {row["name"]: row["budget"] for row in rows}
    return [of(text) for _, text in sorted(newest.items())]


def of(written: str) -> Use:
    """The use of a budget as it is written in a job."""
    limit = cap.parse_budget(written)
    return _use(limit, _settled(_query(_OF, limit.name)))


def _query(text: str, *values: str) -> list[dict[str, Any]]:
    """What a query on the table finds; the first run with a budget makes it."""
    if not registry.query([("SELECT 1 FROM sqlite_master WHERE name = 'budget_runs'", [])]):
        return []
    return [dict(row) for row in registry.query([(text, values)])]


def _settled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the cost of runs that have ended since."""
    known = registry.lookup(*(row["run"] for row in rows if row["cost"] is None))
    ended = {
        name: run
        for name, run in known.items()
        if State(run.state).final and not registry.may_still_come(run)
    }
    return [_with_cost(row, ended[row["run"]]) if row["run"] in ended else row for row in rows]


def _with_cost(row: dict[str, Any], run: Run) -> dict[str, Any]:
    """The row with what the run, which has ended, has cost; its worst case if that is unknown."""
    spent = prices.spent(Path(run.folder, backend.PRICE), run.billed)
    cost = row["worst"] if spent is None else str(spent.amount)
    if run.state == State.UNSENT.value:
        cost = "0"
    return {**row, "cost": cost, "ended": run.finished or registry.now()}


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
