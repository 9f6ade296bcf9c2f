"""Prices, and where a job could run: estimates, quotas, spot prices, training plans."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, NamedTuple

from deploykit.backends.capabilities import Start
from deploykit.backends.sagemaker import aws, catalog
from deploykit.backends.sagemaker.options import Options, region
from deploykit.cost import money, prices
from deploykit.cost.estimate import Charge, Estimate, Seconds, attempts
from deploykit.cost.prices import Price, PriceList
from deploykit.job.decode import Malformed, from_json
from deploykit.job.model import JobSpec, Plan
from deploykit.lib import units
from deploykit.lib.errors import BackendUnavailable, DeploykitError, UsageError

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
    how = f"{attempts(count)} of {units.exact_span(limit)} and {units.exact_span(_GRACE)} to end"
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


_SERVICE = "AmazonSageMaker"
_ENDPOINTS = {"ap": "ap-south-1", "eu": "eu-central-1"}
"""Regions of the service, by the beginning of a near region; else us-east-1:
https://docs.aws.amazon.com/general/latest/gr/billing.html"""
_LIST_SOURCE = "AWS's price list (GetProducts)"
_USAGE = re.compile(r"(?:[A-Z0-9]+-)?Train:(ml\.[a-z0-9-]+\.[a-z0-9]+|VolumeUsage\.gp[23])")
"""The usage type of a product: ``USE1-Train:ml.g5.xlarge``."""
_MAX_PAGES = 200
"""Pages of an answer, 100 products each: a region has a few thousand."""


class Product(NamedTuple):
    """A price of the list: its machine, or its disk, and the price in USD."""

    name: str
    price: str


def refresh(region: str | None) -> str:
    """Store the prices of a region. Returns a line for people.

    Raises UsageError without a region, BackendUnavailable for an answer without prices, and what
    `aws.errors` raises.
    """
    if not region:
        raise UsageError("no region is chosen", hint="sagemaker.region, or AWS_REGION")
    products = {one.name: one.price for one in _products(region)}
    machines = {name: price for name, price in products.items() if name.startswith("ml.")}
    if not machines:
        raise BackendUnavailable(f"AWS's price list has no prices of training in {region}")
    disk = products.get("VolumeUsage.gp2", "")
    today = dt.datetime.now(dt.UTC).date().isoformat()
    path = prices.store(PROVIDER, PriceList(region, "USD", today, _LIST_SOURCE, machines, disk))
    return f"{len(machines)} prices of {region}, of {today}: {path}"


def _products(region: str) -> Iterator[Product]:
    """The products of training in a region.

    All of the service are asked for: what a product is for can be told by its usage type alone.
    """
    near = _ENDPOINTS.get(region.partition("-")[0], "us-east-1")
    client = aws.client("pricing", near)
    filters = [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}]
    with aws.errors(near):
        pages = client.get_paginator("get_products").paginate(
            ServiceCode=_SERVICE, Filters=filters, PaginationConfig={"MaxItems": _MAX_PAGES * 100}
        )
        for page in pages:
            for text in page.get("PriceList", ()):
                if (product := parse(text)) is not None:
                    yield product


def parse(text: str) -> Product | None:
    """A product of the list as JSON text; None for anything but a price of training on demand."""
    try:
        data = from_json(text)
        usage = _USAGE.fullmatch(data["product"]["attributes"]["usagetype"])
        price = next(_positive_prices(data["terms"]["OnDemand"]), None)
    except (Malformed, KeyError, TypeError, AttributeError):
        return None
    if usage is None or price is None:
        return None
    return Product(usage[1], price)


def _positive_prices(terms: Mapping[str, Any]) -> Iterator[str]:
    """The prices in USD of on-demand terms, those above zero."""
    for term in terms.values():
        for dimension in term["priceDimensions"].values():
            price = dimension["pricePerUnit"].get("USD")
            if prices.is_price(price) and price.strip("0."):
                yield price


_UNKNOWN = "AWS does not say when instances will be free"


def quota_starts(plan: Plan) -> Iterator[Start]:
    """Whether the quotas allow the job as it is, and on spot instances.

    Where they cannot be read, that is said. Raises NotPermitted without valid credentials, and
    BackendUnavailable if AWS cannot be reached at all.
    """
    quotas: Mapping[str, float] | DeploykitError
    try:
        quotas = _quotas(plan.target)
    except DeploykitError as error:
        if error.__cause__ is None or aws.code(error.__cause__) not in aws.DENIED:
            aws.account(plan.target)
        quotas = error
    options: Options = plan.options
    yield _quota_start(plan, options, quotas)
    other = _on_spot(plan)
    if other is not None:
        wait = f"{other.max_wait}s"
        settings = {"sagemaker.spot": "true", "sagemaker.max_wait": wait}
        yield _quota_start(plan, other, quotas)._replace(settings=settings)


def _on_spot(plan: Plan) -> Options | None:
    """The job on spot instances, which it may await as long as it runs; None where it has them."""
    options: Options = plan.options
    if options.spot or options.training_plan or options.keep_alive or options.instance_groups:
        return None
    longest = plan.job.resources.time_limit * (1 + plan.job.retries)
    return replace(options, spot=True, max_wait=2 * longest)


def _quota_start(
    plan: Plan, options: Options, quotas: Mapping[str, float] | DeploykitError
) -> Start:
    """Whether the quota allows the job with these options."""
    nodes = plan.job.resources.nodes
    where = f"{options.training_type}{' (spot)' * options.spot} in {plan.target}"
    value = None if isinstance(quotas, DeploykitError) else quotas.get(options.quota)
    if value is not None and value < nodes:
        reason = f"the quota {options.quota!r} is {value:g}, and the job needs {nodes}"
        return Start(where, options, None, reason, possible=False)
    known = "not listed" if value is None else f"{value:g}"
    if isinstance(quotas, DeploykitError):
        known = f"not known: {quotas.message}"
    more = _UNKNOWN
    if options.spot:
        more = spot_sentence(options.training_type, plan.target)
    return Start(where, options, None, f"the quota {options.quota!r} is {known}; {more}")


def _quotas(region: str) -> dict[str, float]:
    """The values of SageMaker's quotas by their names."""
    client: Any = aws.client("service-quotas", region)
    with aws.errors(region):
        pages = client.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
        every = [one for page in pages for one in page.get("Quotas", ())]
    return {
        one["QuotaName"]: float(one["Value"])
        for one in every
        if {"QuotaName", "Value"} <= one.keys()
    }


_DAYS = 7
_SYSTEM = "Linux/UNIX"
_MAX_SPOT_PRICES = 20_000
"""Prices that are read: a zone has a few a day."""


def spot_sentence(kind: str, region: str) -> str:
    """One sentence about the prices of ``ml.g5.xlarge`` and its like, or why there are none."""
    name = kind.removeprefix("ml.")
    try:
        history = _spot_prices(name, region)
    except DeploykitError as error:
        return f"no spot prices: {error.message}"
    if not history:
        return f"EC2 has sold no spot instances of {name} in {region} for {_DAYS} days"
    amounts = sorted(map(_amount, history))
    zone, now = _cheapest(history)
    return (
        f"EC2's spot price of {name} in the last {_DAYS} days: {money.exact(amounts[0])} to "
        f"{money.exact(amounts[-1])} USD an hour; now {money.exact(now)} in {zone}"
        f"{_beside(now, kind, region)}"
    )


def _spot_prices(name: str, region: str) -> Sequence[Mapping[str, Any]]:
    """The valid prices of the last days. Raises what `aws.errors` raises."""
    client: Any = aws.client("ec2", region)
    with aws.errors(region):
        pages = client.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=[name],
            ProductDescriptions=[_SYSTEM],
            StartTime=dt.datetime.now(dt.UTC) - dt.timedelta(days=_DAYS),
            PaginationConfig={"MaxItems": _MAX_SPOT_PRICES},
        )
        every = [one for page in pages for one in page.get("SpotPriceHistory", ())]
    return [one for one in every if prices.is_price(one.get("SpotPrice")) and "Timestamp" in one]


def _amount(one: Mapping[str, Any]) -> Decimal:
    return Decimal(one["SpotPrice"])


def _cheapest(history: Sequence[Mapping[str, Any]]) -> tuple[str, Decimal]:
    """The zone whose newest price is the lowest, and that price."""
    newest = {one.get("AvailabilityZone", "-"): one for one in sorted(history, key=_timestamp)}
    zone = min(newest, key=lambda name: _amount(newest[name]))
    return zone, _amount(newest[zone])


def _timestamp(one: Mapping[str, Any]) -> dt.datetime:
    time: dt.datetime = one["Timestamp"]
    return time


def _beside(price: Decimal, kind: str, region: str) -> str:
    """How much that is of SageMaker's price on demand, if that is known."""
    known = prices.machine(PROVIDER, region, kind)
    if known is None or not known[0].amount:
        return ""
    return f", {price / known[0].amount:.0%} of SageMaker's price on demand"


_HOUR = 3600
_SEARCH = "SearchTrainingPlanOfferings"
"""https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_SearchTrainingPlanOfferings.html"""


def plan_starts(plan: Plan) -> Iterator[Start]:
    """When the job would start with each offer for its machines; none that it could use unbought.

    Machines that are not sold in plans have none. Where AWS refuses to tell, that is the reason.
    """
    options: Options = plan.options
    if options.training_plan:
        return
    options = replace(options, training_plan="on offer")  # its cost is unknown
    client: Any = aws.client("sagemaker", plan.target)
    shape = client.meta.service_model.operation_model(_SEARCH).input_shape
    if options.training_type not in shape.members["InstanceType"].enum:
        return
    try:
        with aws.errors(plan.target):
            response = client.search_training_plan_offerings(
                InstanceType=options.training_type,
                InstanceCount=plan.job.resources.nodes,
                DurationHours=-(-(plan.job.resources.time_limit or 1) // _HOUR),
                TargetResources=["training-job"],
            )
    except DeploykitError as error:
        where = f"training plans in {plan.target}"
        yield Start(where, options, None, error.message, possible=False)
        return
    for offer in response["TrainingPlanOfferings"]:
        for part in offer.get("ReservedCapacityOfferings", ())[:1]:
            yield _plan_start(options, offer, part, plan.target)


def _plan_start(
    options: Options, offer: Mapping[str, Any], part: Mapping[str, Any], region: str
) -> Start:
    fee = f"{offer.get('UpfrontFee', 'an unknown sum')} {offer.get('CurrencyCode', '')}".strip()
    length = f"{offer['DurationHours']} h" if "DurationHours" in offer else "an unknown time"
    reason = (
        f"on offer for {length} at {fee}, paid in advance: `aws sagemaker create-training-plan "
        f"--training-plan-offering-id {offer['TrainingPlanOfferingId']}`, then set "
        "sagemaker.training_plan"
    )
    where = f"training plan in {part.get('AvailabilityZone', region)}"
    return Start(where, options, part.get("StartTime"), reason, possible=False)
