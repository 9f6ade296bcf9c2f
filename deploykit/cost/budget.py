"""A budget: what all runs under it may cost together, in all or in each month."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import NamedTuple

from deploykit.cost import money
from deploykit.cost.estimate import Estimate
from deploykit.cost.money import Money
from deploykit.job.model import BUDGET, JobSpec, Problem

_OVERRUN = 60
"""Seconds for which a run may be billed after it was stopped at its own cap."""
_MONTH = "/month"
_FOR = " for "


class Budget(NamedTuple):
    """``500 USD/month for vision``: runs of budgets with the same name count together."""

    limit: Money
    monthly: bool
    name: str
    """Empty for the budget without a name."""

    def __str__(self) -> str:
        return f"{self.limit}{' a month' * self.monthly}{_FOR + self.name if self.name else ''}"


def parse(written: str) -> Budget:
    """Raises ValueError."""
    if not is_valid(written):
        raise ValueError(f"expected {BUDGET.meaning}")
    amount, _, name = written.partition(_FOR)
    return Budget(money.parse(amount.removesuffix(_MONTH)), amount.endswith(_MONTH), name)


def is_valid(written: str) -> bool:
    """Whether a text is a budget."""
    return re.fullmatch(BUDGET.regex, written) is not None


def worst(job: JobSpec, estimate: Estimate) -> Decimal | None:
    """What a run may cost: its worst case, or its own cap where it is stopped at that."""
    amount = estimate.amount("worst")
    if not job.stop_at_cap or job.max_cost is None:
        return amount
    own = money.parse(job.max_cost).amount + money.for_seconds(estimate.hourly, _OVERRUN)
    return own if amount is None else min(own, amount)


def problems(job: JobSpec, estimate: Estimate | None) -> Iterator[Problem]:
    """Why the budget of a job cannot be kept, whatever other runs have cost."""
    if job.budget is None or (estimate is not None and estimate.free):
        return
    budget = parse(job.budget)
    if estimate is None:
        message = "this backend has no prices, so the budget cannot be enforced"
        yield Problem("budget", message, "remove it")
    elif estimate.unknown:
        yield Problem("budget", f"cannot be enforced: {'; '.join(estimate.unknown)}")
    elif budget.limit.currency != estimate.currency:
        message = f"is in {budget.limit.currency}, but the prices are in {estimate.currency}"
        yield Problem("budget", message, f"for example 500 {estimate.currency}/month")
    elif (amount := worst(job, estimate)) is None:
        message = "cannot be enforced: the cost of the job has no upper bound"
        yield Problem("budget", message, "set a time limit, or max_cost and stop_at_cap")
    elif amount > budget.limit.amount:
        may = money.text(amount, estimate.currency)
        hint = "lower the time limit or the restarts, or set max_cost and stop_at_cap"
        yield Problem("budget", f"{budget} is less than the job may cost, {may}", hint)
