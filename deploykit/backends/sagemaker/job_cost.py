"""What a training job may cost: its machines, their disks and its warm pool, by the second.

Billing: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html
(`TrainingStartTime`, `BillableTimeInSeconds`).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal

from deploykit.backends.sagemaker import catalog
from deploykit.backends.sagemaker.options import Options, region
from deploykit.cost import prices
from deploykit.cost.estimate import Charge, Estimate, Seconds
from deploykit.cost.prices import Price
from deploykit.job.model import JobSpec
from deploykit.lib import units

PROVIDER = "sagemaker"
_GRACE = 120
"""Seconds that the service gives a job to end after its time limit.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StoppingCondition.html
"""
_SPOT = Decimal("0.9")
"""The largest share that AWS says spot instances save:
https://docs.aws.amazon.com/sagemaker/latest/dg/model-managed-spot-training.html"""
_MONTH = 730
"""Hours of a month, by which AWS turns a price per month into one per hour."""
_PLAN = "the price of a training plan; the plan is paid in advance, and AWS's console shows it"
_REFRESH = "`deploykit cost --refresh` asks AWS"


def estimate(job: JobSpec, options: Options) -> Estimate:
    """What the job may cost."""
    if options.training_plan:
        return Estimate(unknown=(_PLAN,))
    where, used = region(options) or "", list[Price]()
    unknown = [] if where else ["no region is chosen, and prices differ: AWS_REGION"]
    charges: list[Charge] = []
    for count, kind in machines(job, options):
        price = prices.machine(PROVIDER, where, kind)
        if price is None:
            unknown += [f"the price of {kind} in {where}; {_REFRESH}"] if where else []
            continue
        used.append(price[0])
        charges += _machine_charges(job, options, f"{count} x {kind}", count * price[0].amount)
        if not catalog.has_nvme(kind):
            disk = prices.storage(PROVIDER, where)
            if disk is None:
                unknown.append(f"the price of a disk in {where}; {_REFRESH}")
                continue
            used.append(disk[0])
            size = count * options.volume_size
            hourly = size * disk[0].amount / _MONTH
            charges.append(Charge(f"{size} GB of disk", hourly, *_time(job, options)))
    old = prices.old(used, _today())
    return Estimate(
        charges=() if unknown else tuple(charges),
        currency="USD",
        unknown=tuple(dict.fromkeys(unknown)),
        source=_source(used),
        notes=tuple(_notes(options)),
        warnings=(old,) if old else (),
    )


def alternatives(job: JobSpec, options: Options) -> dict[str, Estimate]:
    """The estimate bought the other way: on spot instances, or on demand."""
    if options.training_plan:
        return {}
    other = replace(options, spot=not options.spot, max_wait=None)
    return {"on-demand" if options.spot else "spot": estimate(job, other)}


def _today() -> dt.date:
    return dt.datetime.now(dt.UTC).date()


def machines(job: JobSpec, options: Options) -> list[tuple[int, str]]:
    """Number and type of the instances, by group."""
    if options.instance_groups:
        return [(group.instance_count, group.instance_type) for group in options.instance_groups]
    return [(job.resources.nodes, options.instance_type or "")]


def _machine_charges(
    job: JobSpec, options: Options, what: str, hourly: Decimal
) -> Iterator[Charge]:
    how = "spot" if options.spot else "on-demand"
    discount = _SPOT if options.spot else Decimal(0)
    yield Charge(f"{what}, {how}", hourly, *_time(job, options), discount)
    if options.keep_alive:
        kept = Seconds(0, options.keep_alive, options.keep_alive)
        how = f"{units.exact_span(options.keep_alive)} keep_alive"
        yield Charge(f"{what}, warm pool", hourly, kept, how, after=True)


def _time(job: JobSpec, options: Options) -> tuple[Seconds, str]:
    """How long the machines are billed, and how the worst case is made."""
    limit, count = job.resources.time_limit, 1 + job.retries
    worst = count * (limit + _GRACE)
    attempts = units.plural(count, "attempt")
    how = f"{attempts} of {units.exact_span(limit)} and {units.exact_span(_GRACE)} to end"
    longest = max(limit, options.max_wait or 0) + _GRACE
    if options.spot and options.max_wait and longest < worst:
        worst, how = (
            longest,
            f"{units.exact_span(options.max_wait)} max_wait and {units.exact_span(_GRACE)} to end",
        )
    return Seconds(limit, limit, worst), how


def _source(used: list[Price]) -> str:
    days = sorted({price.day for price in used})
    return f"AWS's prices of {days[0]}" if days else ""


def _notes(options: Options) -> Iterator[str]:
    yield "low and likely: one attempt that uses its whole time limit"
    if options.spot:
        yield "spot: waiting for instances is not billed; max_wait only ends the job"
        yield f"spot: low is with AWS's largest saving, {_SPOT:.0%}; likely and worst are on-demand"
    yield "endpoint hours: none, since deploykit creates no endpoints"
    yield "not counted: S3, CloudWatch, data transfer, uploads after the time limit, taxes"
