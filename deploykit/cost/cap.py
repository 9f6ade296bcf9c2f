"""The cap: what a job may cost at most, checked before it is sent and kept by its launcher.

The launcher on the node cannot ask for prices. It gets the seconds that the cap pays for, and
watches its own clock (``entrypoints/deploykit_node/cap.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import ROUND_FLOOR

from deploykit.cost import budget, money
from deploykit.cost.estimate import Estimate
from deploykit.cost.money import Money
from deploykit.job.model import JobSpec, Problem
from deploykit.lib import units

VARIABLE = "DEPLOYKIT_CAP"
_LEAST = 120
"""Seconds that a cap must pay for: with less, nothing could be trained and saved."""


def problems(job: JobSpec, estimate: Estimate | None) -> Iterator[Problem]:
    """Why a job with a cap or a budget is refused, or what its cap does not cover.

    `estimate` is None for a backend that offers none.
    """
    yield from budget.problems(job, estimate)
    if job.max_cost is None:
        if job.stop_at_cap:
            yield Problem("stop_at_cap", "requires max_cost", "--max-cost '50 USD'")
        return
    cap = money.parse(job.max_cost)
    if estimate is None:
        message = "this backend has no prices, so the cap cannot be enforced"
        yield Problem("max_cost", message, "remove it")
    elif estimate.unknown:
        yield Problem("max_cost", f"cannot be enforced: {'; '.join(estimate.unknown)}")
    elif not estimate.charges:
        yield Problem("max_cost", f"has no effect: {estimate.free}", severity="warning")
    elif cap.currency != estimate.currency:
        message = f"is in {cap.currency}, but the prices are in {estimate.currency}"
        yield Problem("max_cost", message, f"for example max_cost: 50 {estimate.currency}")
    elif job.stop_at_cap:
        yield from _too_little(cap, estimate)
    else:
        yield from _too_much(cap, estimate)


def exceeds(cap: Money, estimate: Estimate) -> bool:
    """Whether a job whose prices are known may cost more than the cap."""
    worst = estimate.amount("worst")
    return worst is None or worst > cap.amount


def _too_much(cap: Money, estimate: Estimate) -> Iterator[Problem]:
    if exceeds(cap, estimate):
        parts = "; ".join(estimate.explained())
        worst = estimate.text("worst")
        message = f"{cap} is less than the job may cost, {worst}: {parts} ({estimate.source})"
        hint = "raise it, lower the time limit or the restarts, or let --stop-at-cap stop the job"
        yield Problem("max_cost", message, hint)


def _too_little(cap: Money, estimate: Estimate) -> Iterator[Problem]:
    seconds = paid(cap, estimate)
    if seconds is not None and seconds < _LEAST:
        each = f"{money.exact(estimate.hourly)} {estimate.currency} an hour"
        message = f"{cap} pays for {max(0, seconds)} s at {each}; at least {_LEAST} s are needed"
        yield Problem("max_cost", message, "raise it")


def paid(cap: Money, estimate: Estimate) -> int | None:
    """The seconds of the job that the cap pays for, after what is billed later; None: any time."""
    if not estimate.hourly:
        return None
    left = cap.amount - estimate.afterwards
    seconds = left * money.HOUR / estimate.hourly
    return int(seconds.to_integral_value(ROUND_FLOOR))


def notices(job: JobSpec, estimate: Estimate) -> Iterator[str]:
    """A line about a job that is to be stopped at its cap; none about any other."""
    stop = _stop(job, estimate)
    if stop is not None:
        limit, seconds = stop
        yield f"it is stopped before it costs more than {limit}: after {units.exact_span(seconds)}"


def variables(job: JobSpec, estimate: Estimate) -> dict[str, str]:
    """The variable for the launchers of a job that is to be stopped at its cap; else none.

    The job must have passed `problems`.
    """
    stop = _stop(job, estimate)
    if stop is None:
        return {}
    limit, seconds = stop
    price = f"{money.exact(estimate.hourly)} {estimate.currency}"
    return {VARIABLE: json.dumps({"seconds": seconds, "cap": str(limit), "hourly": price})}


def _stop(job: JobSpec, estimate: Estimate) -> tuple[Money, int] | None:
    """The cap at which a job is to be stopped, and the seconds that it pays for; else None."""
    if not job.stop_at_cap or job.max_cost is None or not estimate.charges:
        return None
    cap = money.parse(job.max_cost)
    seconds = paid(cap, estimate)
    return None if seconds is None or not exceeds(cap, estimate) else (cap, seconds)
