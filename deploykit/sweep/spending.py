"""What the runs of a sweep have cost and may cost: one that has not ended counts at its worst."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from deploykit.backends import base as backend
from deploykit.cost import money, prices
from deploykit.cost.cap import worst
from deploykit.cost.estimate import Estimate
from deploykit.cost.money import Money
from deploykit.job.model import Problem, State
from deploykit.run import lifecycle
from deploykit.run.registry import Run, may_still_come
from deploykit.sweep.model import Sweep
from deploykit.sweep.trial_job import Base


class Budget(NamedTuple):
    """The cap of a sweep, and what each of its runs may cost."""

    cap: Money | None = None
    worst: Decimal = Decimal(0)
    """Of one run, in the currency of the cap."""

    def committed(self, rows: Iterable[Run]) -> Decimal:
        """What these runs have cost, and those that have not ended may cost."""
        return sum((self._of(row) for row in rows), Decimal(0))

    def allows(self, committed: Decimal, runs: int) -> bool:
        """Whether `runs` more runs cannot exceed the cap."""
        return self.cap is None or committed + runs * self.worst <= self.cap.amount

    def _of(self, row: Run) -> Decimal:
        if row.state == State.UNSENT.value and not may_still_come(row):
            return Decimal(0)
        known = _spent(row) if State(row.state).final else None
        return self.worst if known is None else known.amount


def total(rows: Iterable[Run]) -> Money | None:
    """What runs have cost so far, as far as it is known; None where nothing is billed."""
    costs = map(_spent, rows)
    return sum_of(Money(one.amount, one.currency) for one in costs if one is not None)


def sum_of(amounts: Iterable[Money]) -> Money | None:
    """The sum of amounts in one currency; None of none."""
    known = list(amounts)
    if not known:
        return None
    return Money(sum((one.amount for one in known), Decimal(0)), known[0].currency)


def _spent(row: Run) -> prices.Spent | None:
    return prices.spent(Path(row.folder, backend.PRICE), row.billed)


def budget(sweep: Sweep, base: Base) -> Budget:
    """The budget of a sweep that has passed `problems`."""
    estimate = _estimate(base)
    if sweep.max_cost is None or estimate is None or not estimate.charges:
        return Budget()
    return Budget(money.parse(sweep.max_cost), worst(base.job, estimate) or Decimal(0))


def problems(sweep: Sweep, base: Base) -> list[Problem]:
    """Why the cap of a sweep cannot be kept."""
    if sweep.max_cost is None:
        return []
    estimate, cap = _estimate(base), money.parse(sweep.max_cost)
    if estimate is None:
        message = "this backend has no prices, so the cap cannot be enforced"
        return [Problem("max_cost", message, "remove it")]
    if estimate.unknown:
        return [Problem("max_cost", f"cannot be enforced: {'; '.join(estimate.unknown)}")]
    if not estimate.charges:
        return [Problem("max_cost", f"has no effect: {estimate.free}", severity="warning")]
    if cap.currency != estimate.currency:
        message = f"is in {cap.currency}, but the prices are in {estimate.currency}"
        return [Problem("max_cost", message, f"for example 50 {estimate.currency}")]
    return _too_little(sweep, cap, worst(base.job, estimate))


def _too_little(sweep: Sweep, cap: Money, most: Decimal | None) -> list[Problem]:
    if most is None:
        message = "cannot be enforced: the cost of a run has no upper bound"
        return [Problem("max_cost", message, "set a time limit, or max_cost and stop_at_cap")]
    runs = sweep.repeat + sweep.promote  # a trial that has paused needs a second run
    if runs * most > cap.amount:
        each = money.text(runs * most, cap.currency)
        hint = "raise it, lower the time limit or the restarts, or set stop_at_cap in the job"
        return [Problem("max_cost", f"{cap} is less than one trial may cost, {each}", hint)]
    return []


def _estimate(base: Base) -> Estimate | None:
    return lifecycle.estimate(backend.find(base.backend), base.job, base.options)
