"""Budgets: what runs and endpoints have cost and may still cost, in a table of the registry's file.

A run is entered before it is sent, at its worst case, in the transaction that finds room for it, so
that two submits at once cannot share the same money. After its end it counts at its actual cost,
also after it was removed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.backends import base as backend
from deploykit.backends.deployment import Deployment, DeploymentPlan, Phase
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
    run      TEXT PRIMARY KEY,  -- or the address of an endpoint, which begins with endpoint/
    name     TEXT NOT NULL,  -- of the budget
    budget   TEXT NOT NULL,  -- as the job had it
    created  REAL NOT NULL,  -- seconds since the epoch
    ended    REAL,
    currency TEXT NOT NULL,
    worst    TEXT NOT NULL,  -- what the run may cost
    cost     TEXT            -- what it has cost, once that is known
)
"""
REFUSED = "the job may cost"
"""Begins the reason of a run that its budget refused."""
_ENDPOINT = "endpoint/"
_OF = "SELECT * FROM budget_runs WHERE name = ?"
_CLOSE = "UPDATE budget_runs SET cost = :cost, ended = :ended WHERE run = :run"


class Use(NamedTuple):
    budget: Budget
    spent: Decimal
    """By runs that have ended."""
    reserved: Decimal
    """By unfinished runs, at their worst."""
    runs: int
    """Those that are reserved, with endpoints."""
    endpoints: int = 0
    overdue: int = 0
    """Endpoints that a schedule should have deleted, and that were not found to be gone."""

    @property
    def left(self) -> Decimal:
        return self.budget.limit.amount - self.spent - self.reserved

    def __str__(self) -> str:
        currency = self.budget.limit.currency
        parts = [f"{money.text(self.spent, currency)} spent"]
        if self.runs:
            held = money.text(self.reserved, currency)
            kinds = ((self.runs - self.endpoints, "unfinished run"), (self.endpoints, "endpoint"))
            open_ones = [units.plural(count, kind) for count, kind in kinds if count]
            parts.append(f"{held} reserved for {' and '.join(open_ones)}")
        if self.overdue:
            one = self.overdue == 1
            late = f"{units.plural(self.overdue, 'endpoint')} {'is' if one else 'are'} past "
            late += f"{'its' if one else 'their'} --for time (`deploykit endpoint` shows whether "
            parts.append(f"{late}{'it is' if one else 'they are'} still running)")
        return f"budget {self.budget}: {money.text(self.left, currency)} left; {', '.join(parts)}"

    def data(self) -> dict[str, Any]:
        amounts = {"spent": self.spent, "reserved": self.reserved, "left": self.left}
        return {
            "budget": str(self.budget),
            "name": self.budget.name,
            "currency": self.budget.limit.currency,
            **{key: float(money.cents(amount)) for key, amount in amounts.items()},
            "runs": self.runs - self.endpoints,
            "endpoints": self.endpoints,
            "overdue": self.overdue,
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
    if _enter(plan.run, plan.job.budget, amount) is None:
        return
    is_open = "run IN (SELECT run FROM budget_runs WHERE name = ? AND cost IS NULL)"
    refresh(registry.select(is_open, [limit.name]))
    use = _enter(plan.run, plan.job.budget, amount)
    if use is not None:
        may = money.text(amount, limit.limit.currency)
        raise UsageError(
            f"{REFUSED} {may}, more than is left in its budget: {use}",
            hint="wait for runs to end, raise the budget, or reduce the time limit or the number "
            "of restarts",
        )


def reserve_endpoint(
    endpoint: DeploymentPlan | Deployment, estimate: Estimate, written: str | None
) -> bool:
    """Enter an endpoint into a budget, at its worst case from now; what it has cost counts too.

    Return whether more is reserved for it already. That stays until its target has accepted the
    change: see `lower_endpoint`. Raises UsageError if it could exceed the budget.
    """
    amount = estimate.amount("worst")
    if written is None or amount is None:
        return False  # `cap.endpoint_problems` refuses an unknown price
    key = _key(endpoint)
    rows = _settled(_query(_OF, cap.parse_budget(written).name))
    if amount < sum(map(_held, _open_rows_of(key, rows))):
        return True
    use = _enter(key, written, amount)
    if use is not None:
        may = money.text(amount, use.budget.limit.currency)
        raise UsageError(
            f"the endpoint may cost {may}, more than is left in its budget: {use}",
            hint="use a shorter time, such as --for 8h, delete other endpoints, or raise the "
            "budget",
        )
    return False


def lower_endpoint(
    endpoint: DeploymentPlan | Deployment, estimate: Estimate, written: str | None
) -> None:
    """Enter an endpoint that costs less from now. What is reserved for it does not rise."""
    amount = estimate.amount("worst")
    if written is not None and amount is not None:
        _enter(_key(endpoint), written, amount, falls=True)


def _key(endpoint: DeploymentPlan | Deployment) -> str:
    address = (endpoint.backend, endpoint.target, endpoint.account, endpoint.name)
    return f"{_ENDPOINT}{'/'.join(address)}/{registry.now():.3f}"


def _enter(key: str, written: str, amount: Decimal, *, falls: bool = False) -> Use | None:
    """Enter a run or an endpoint if there is room for it; else return the use of the budget.

    An earlier entry of the same endpoint ends now, with what it has cost. `falls`: the new one
    reserves at most as much.
    """
    limit, now = cap.parse_budget(written), registry.now()
    with registry.writing() as database:
        database.execute(_TABLE)
        entered = database.execute(_OF, [limit.name]).fetchall()
        others = _settled([dict(row) for row in entered if row["run"] != key])
        own = _open_rows_of(key, others)
        held = sum(map(_held, own), Decimal(0))
        for row in own:
            row |= {"cost": row["so_far"], "ended": now}
        amount = min(amount, held) if falls else amount
        closed = [{name: row[name] for name in ("run", "cost", "ended")} for row in others]
        use = _use(limit, others)
        if amount > max(use.left, held):
            return use
        database.executemany(_CLOSE, [row for row in closed if row["cost"] is not None])
        database.execute(
            "INSERT OR REPLACE INTO budget_runs VALUES (?, ?, ?, ?, NULL, ?, ?, NULL)",
            (
                key,
                limit.name,
                written,
                now,
                limit.limit.currency,
                str(amount),
            ),
        )
    return None


def _open_rows_of(key: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of the endpoint of an entry that has not ended; none for a run."""
    own = _endpoint_of(key)
    return [row for row in rows if own and row["cost"] is None and _endpoint_of(row["run"]) == own]


def _held(row: Mapping[str, Any]) -> Decimal:
    """What an endpoint may still cost."""
    return Decimal(row["worst"]) - Decimal(row["so_far"])


def _endpoint_of(key: str) -> str:
    """The address of an endpoint, without the time of its entry; empty for a run."""
    return key.rpartition("/")[0] if key.startswith(_ENDPOINT) else ""


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
    """The rows with the cost of runs and endpoints that have ended since."""
    rows = [_endpoint(row) if row["run"].startswith(_ENDPOINT) else row for row in rows]
    known = registry.lookup(*(row["run"] for row in rows if row["cost"] is None))
    ended = {
        name: run
        for name, run in known.items()
        if State(run.state).final and not registry.may_still_come(run)
    }
    return [_with_cost(row, ended[row["run"]]) if row["run"] in ended else row for row in rows]


def _endpoint(row: dict[str, Any]) -> dict[str, Any]:
    """The row of an endpoint, with its cost if it is gone, and else with what it cost so far.

    An endpoint is billed until it is found to be gone: a schedule may have failed to delete it.
    """
    if row["cost"] is not None:
        return row
    now, (_, where, target, account, name, _) = registry.now(), row["run"].split("/")
    if not registry.query([("SELECT 1 FROM sqlite_master WHERE name = 'deployments'", [])]):
        lives = []
    else:
        text = (
            "SELECT ended, settings, phase FROM deployments WHERE backend = ? AND target = ? "
            "AND account = ? AND name = ? AND (ended IS NULL OR ended >= CAST(? AS REAL)) "
            "ORDER BY activated"
        )
        values = (where, target, account, name, str(row["created"]))
        lives = registry.query([(text, values)])
    if not lives:
        is_gone = now - row["created"] > registry.IN_FLIGHT  # the request was refused
        return {**row, "so_far": "0", **({"cost": "0", "ended": now} if is_gone else {})}
    newest = ([life for life in lives if life["phase"] != Phase.SENDING.value] or lives)[-1]
    settings = json.loads(newest["settings"])
    price, until, ended = (
        Decimal(settings.get("price") or 0),
        settings.get("until"),
        newest["ended"],
    )
    spent = money.for_seconds(price, math.ceil((ended or now) - row["created"]))
    if ended is not None:
        return {**row, "cost": str(spent), "ended": ended}
    worst = str(max(spent, Decimal(row["worst"])))
    return {**row, "so_far": str(spent), "worst": worst, "is_overdue": (until or now) < now}


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
        sum(row["run"].startswith(_ENDPOINT) for row in held),
        sum(row.get("is_overdue", False) for row in held),
    )
