"""What a job may cost at most: its own cap, and the budget that it shares with other runs.

A cap is checked before the job is sent and kept by its launcher, which cannot ask for prices: it
gets the seconds that the cap pays for, and watches its own clock
(``entrypoints/deploykit_node/restart/cap.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import ROUND_FLOOR, Decimal
from typing import NamedTuple

from deploykit.cost import money
from deploykit.cost.estimate import Estimate
from deploykit.cost.money import Money
from deploykit.job.model import BUDGET, JobSpec, Problem
from deploykit.lib import units

VARIABLE = "DEPLOYKIT_CAP"
_MIN_SECONDS = 120
"""That a cap must pay for: with less, nothing could be trained and saved."""
_OVERRUN_SECONDS = 60
"""For which a run may be billed after it was stopped at its own cap."""
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


def parse_budget(written: str) -> Budget:
    """Raises ValueError."""
    if re.fullmatch(BUDGET.regex, written) is None:
        raise ValueError(f"expected {BUDGET.meaning}")
    amount, _, name = written.partition(_FOR)
    return Budget(money.parse(amount.removesuffix(_MONTH)), amount.endswith(_MONTH), name)


def unusable(path: str, limit: Money, estimate: Estimate | None, example: str) -> Problem | None:
    """Why the cap or budget at `path` cannot be enforced, whatever the job costs; None if it can.

    `example` is a limit in the right form, without its currency. `estimate` is None for a backend
    that offers none.
    """
    if estimate is None:
        noun = "budget" if path == "budget" else "cap"
        message = f"this backend has no prices, so the {noun} cannot be enforced"
        return Problem(path, message, "remove it")
    if estimate.unknown:
        return Problem(path, f"cannot be enforced: {'; '.join(estimate.unknown)}")
    if estimate.charges and limit.currency != estimate.currency:
        message = f"is in {limit.currency}, but the prices are in {estimate.currency}"
        return Problem(path, message, f"for example {example.format(estimate.currency)}")
    if not estimate.charges and path != "budget":
        return Problem(path, f"has no effect: {estimate.free}", severity="warning")
    return None


def problems(job: JobSpec, estimate: Estimate | None) -> Iterator[Problem]:
    """Why a job with a cap or a budget is refused, or what its cap does not cover.

    `estimate` is None for a backend that offers none.
    """
    if job.budget is not None:
        yield from _budget_problems(job, parse_budget(job.budget), estimate)
    if job.max_cost is not None:
        yield from _cap_problems(job, money.parse(job.max_cost), estimate)
    elif job.stop_at_cap:
        yield Problem("stop_at_cap", "requires max_cost", "--max-cost '50 USD'")


def _budget_problems(job: JobSpec, budget: Budget, estimate: Estimate | None) -> Iterator[Problem]:
    """Why a budget cannot be kept, whatever other runs have cost."""
    if problem := unusable("budget", budget.limit, estimate, "500 {}/month"):
        yield problem
    elif estimate is None or not estimate.charges:
        return
    elif (amount := worst(job, estimate)) is None:
        message = "cannot be enforced: the cost of the job has no upper bound"
        yield Problem("budget", message, "set a time limit, or both max_cost and stop_at_cap")
    elif amount > budget.limit.amount:
        may = money.text(amount, estimate.currency)
        hint = "lower the time limit or the number of restarts, or set max_cost and stop_at_cap"
        yield Problem("budget", f"the job may cost {may}, more than {budget}", hint)


def _cap_problems(job: JobSpec, cap: Money, estimate: Estimate | None) -> Iterator[Problem]:
    if problem := unusable("max_cost", cap, estimate, "max_cost: 50 {}"):
        yield problem
    elif estimate is None:
        return
    elif job.stop_at_cap:
        seconds = paid(cap, estimate)
        if seconds is not None and seconds < _MIN_SECONDS:
            price = f"{money.exact(estimate.hourly)} {estimate.currency} an hour"
            message = f"{cap} pays for {max(0, seconds)} s at {price}; "
            yield Problem(
                "max_cost", f"{message}at least {_MIN_SECONDS} s are required", "raise max_cost"
            )
    elif exceeds(cap, estimate):
        parts = "; ".join(estimate.explained())
        may = estimate.text("worst")
        message = f"the job may cost {may}, more than {cap}: {parts} ({estimate.source})"
        hint = (
            "raise max_cost, lower the time limit or the number of restarts, or use --stop-at-cap"
        )
        yield Problem("max_cost", message, hint)


def endpoint_problems(
    max_cost: str | None,
    budget: str | None,
    estimate: Estimate,
    seconds: int | None,
    ways: str = "",
) -> Iterator[Problem]:
    """Why an endpoint is refused: what it may cost in `seconds`, or in a month, is too much.

    `ways`: what to do about the limit `{}`; by default, to deploy it for a shorter time.
    """
    time = "in a month" if seconds is None else f"in {units.exact_span(seconds)}"
    ends = "delete it earlier with --for 8h" if seconds is None else "use a shorter --for"
    limits: list[tuple[str, Money]] = []
    if max_cost is not None:
        limits.append(("max_cost", money.parse(max_cost)))
    if budget is not None:
        limits.append(("budget", parse_budget(budget).limit))
    for path, limit in limits:
        example = "max_cost: 50 {}" if path == "max_cost" else "500 {}/month"
        if problem := unusable(path, limit, estimate, example):
            yield problem
        elif exceeds(limit, estimate):
            may = estimate.text("worst")
            parts = "; ".join(estimate.explained())
            message = f"the endpoint may cost {may} {time}, more than {limit}: {parts}"
            hint = ways.format(path) if ways else f"{ends}, or raise {path}"
            yield Problem(path, f"{message} ({estimate.source})", hint)


def worst(job: JobSpec, estimate: Estimate) -> Decimal | None:
    """What a run may cost: its worst case, or its own cap if it is stopped at that."""
    amount = estimate.amount("worst")
    if not job.stop_at_cap or job.max_cost is None:
        return amount
    own = money.parse(job.max_cost).amount
    own += money.for_seconds(estimate.hourly, _OVERRUN_SECONDS)
    return own if amount is None else min(own, amount)


def exceeds(cap: Money, estimate: Estimate) -> bool:
    """Whether a job whose prices are known may cost more than the cap."""
    amount = estimate.amount("worst")
    return amount is None or amount > cap.amount


def paid(cap: Money, estimate: Estimate) -> int | None:
    """The seconds of the job that the cap pays for, after what is billed later; None: any time."""
    if not estimate.hourly:
        return None
    seconds = (cap.amount - estimate.afterwards) * money.HOUR / estimate.hourly
    return int(seconds.to_integral_value(ROUND_FLOOR))


def stop(job: JobSpec, estimate: Estimate) -> tuple[Money, int] | None:
    """The cap at which a job will be stopped, and the seconds that it pays for; else None."""
    if not job.stop_at_cap or job.max_cost is None or not estimate.charges:
        return None
    cap = money.parse(job.max_cost)
    seconds = paid(cap, estimate)
    return None if seconds is None or not exceeds(cap, estimate) else (cap, seconds)


def variables(job: JobSpec, estimate: Estimate) -> dict[str, str]:
    """The variable for the launchers of a job that will be stopped at its cap; else none.

    The job must have passed `problems`.
    """
    stopped = stop(job, estimate)
    if stopped is None:
        return {}
    limit, seconds = stopped
    price = f"{money.exact(estimate.hourly)} {estimate.currency}"
    return {VARIABLE: json.dumps({"seconds": seconds, "cap": str(limit), "hourly": price})}
