"""What a job costs, and whether AWS has machines for it: prices, quotas, spot, training plans.

`cost` is pure; the others ask AWS. Of an unexpected answer only what is understood counts.
Billing: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html
(`TrainingStartTime`, `BillableTimeInSeconds`).
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

from deploykit.backends.base import Start
from deploykit.backends.sagemaker import aws, hardware
from deploykit.backends.sagemaker.options import Options, machines, preferred, region
from deploykit.cost import money, prices
from deploykit.cost.estimate import Charge, Estimate, Seconds
from deploykit.cost.prices import Price, PriceList
from deploykit.job.decode import Malformed, from_json
from deploykit.job.model import JobSpec, Plan
from deploykit.lib import units
from deploykit.lib.errors import BackendUnavailable, DeploykitError, UsageError

PROVIDER = "sagemaker"
_GRACE = 120
"""Seconds that the service gives a job to end after its time limit:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StoppingCondition.html"""
_SPOT = Decimal("0.9")
"""The largest share that AWS says spot instances save:
https://docs.aws.amazon.com/sagemaker/latest/dg/model-managed-spot-training.html"""
MONTH = 730
"""Hours of a month, by which AWS turns a price per month into one per hour."""
_PLAN = "a training plan is paid in advance; the AWS console shows its price"
REFRESH = "`deploykit cost --refresh` fetches prices from AWS"
_ENDPOINTS = {"ap": "ap-south-1", "eu": "eu-central-1"}
"""Regions of the price list, by the beginning of a near region; else us-east-1:
https://docs.aws.amazon.com/general/latest/gr/billing.html"""
_USAGE = re.compile(
    r"(?:[A-Z0-9]+-)?(Train:ml\.[a-z0-9-]+\.[a-z0-9]+|Train:VolumeUsage\.gp[23]"
    r"|Host:ml\.[a-z0-9-]+\.[a-z0-9]+)"
)
"""The usage type of a product: ``USE1-Train:ml.g5.xlarge``; that of an endpoint has ``Host``."""
_MAX_PRODUCTS = 20_000
"""Products that are read: a region has a few thousand, without a filter for training."""
_SPOT_DAYS = 7
_MAX_SPOT_PRICES = 20_000
"""Prices that are read: a zone has a few a day."""
_SEARCH = "SearchTrainingPlanOfferings"
"""https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_SearchTrainingPlanOfferings.html"""


def cost(job: JobSpec, options: Options) -> Estimate:
    """The estimate; with `instance_preferences`, that of the most expensive type."""
    if options.instance_preferences:
        estimates = [cost(job, alone) for alone in preferred(options)]
        return max(estimates, key=lambda one: (bool(one.unknown), one.hourly))
    if options.training_plan:
        return Estimate(unknown=(_PLAN,))
    where, used = region(options) or "", list[Price]()
    unknown = [] if where else ["no region is set, and prices differ by region; set AWS_REGION"]
    charges: list[Charge] = []
    for count, kind in machines(job, options):
        price = prices.machine(PROVIDER, where, kind)
        if price is None:
            unknown += [f"no price is known for {kind} in {where}; {REFRESH}"] if where else []
            continue
        used.append(price[0])
        charges += _machine_charges(job, options, f"{count} x {kind}", count * price[0].amount)
        if not hardware.of(kind).nvme:
            disk = prices.storage(PROVIDER, where)
            if disk is None:
                unknown.append(f"no price is known for disks in {where}; {REFRESH}")
                continue
            used.append(disk[0])
            size = count * options.volume_size
            hourly = size * disk[0].amount / MONTH
            charges.append(Charge(f"{size} GB of disk", hourly, *_billed_time(job, options)))
    days = sorted({price.day for price in used})
    old = prices.old(used, dt.datetime.now(dt.UTC).date())
    return Estimate(
        charges=() if unknown else tuple(charges),
        currency="USD",
        unknown=tuple(dict.fromkeys(unknown)),
        source=f"AWS prices as of {days[0]}" if days else "",
        notes=tuple(_notes(options)),
        warnings=(old,) if old else (),
    )


def alternatives(job: JobSpec, options: Options) -> dict[str, Estimate]:
    """The estimate bought the other way: on spot instances, or on demand."""
    if options.training_plan or options.instance_preferences:
        return {}
    other = replace(options, spot=not options.spot, max_wait=None)
    return {"on-demand" if options.spot else "spot": cost(job, other)}


def _machine_charges(
    job: JobSpec, options: Options, what: str, hourly: Decimal
) -> Iterator[Charge]:
    how = "spot" if options.spot else "on-demand"
    discount = _SPOT if options.spot else Decimal(0)
    yield Charge(f"{what}, {how}", hourly, *_billed_time(job, options), discount)
    if options.keep_alive:
        kept = Seconds(0, options.keep_alive, options.keep_alive)
        how = f"{units.exact_span(options.keep_alive)} keep_alive"
        yield Charge(f"{what}, warm pool", hourly, kept, how, after=True)


def _billed_time(job: JobSpec, options: Options) -> tuple[Seconds, str]:
    """How long the machines are billed, and how the worst case is made."""
    limit, count = job.resources.time_limit, 1 + job.retries
    worst = count * (limit + _GRACE)
    attempts = units.plural(count, "attempt")
    how = f"{attempts} of {units.exact_span(limit)} plus {units.exact_span(_GRACE)} to stop"
    longest = max(limit, options.max_wait or 0) + _GRACE
    if options.spot and options.max_wait and longest < worst:
        worst = longest
        wait, grace = units.exact_span(options.max_wait), units.exact_span(_GRACE)
        how = f"max_wait of {wait} plus {grace} to stop"
    return Seconds(limit, limit, worst), how


def _notes(options: Options) -> Iterator[str]:
    yield "low and likely assume one attempt that uses its whole time limit"
    if options.spot:
        yield "spot: time spent waiting for instances is not billed"
        yield f"spot: low assumes AWS's maximum saving, {_SPOT:.0%}; likely and worst are on-demand"
    yield "not included: S3, CloudWatch, data transfer, uploads after the time limit, taxes"


def refresh_prices(job: JobSpec, options: Options) -> str:  # noqa: ARG001 - the contract
    """Store what AWS's price list says of the job's region. Returns a line for people.

    https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html

    Raises UsageError without a region, BackendUnavailable for an answer without prices, and what
    `aws.errors` raises.
    """
    where = region(options)
    if not where:
        raise UsageError("no region is set", hint="set sagemaker.region or AWS_REGION")
    near = _ENDPOINTS.get(where.partition("-")[0], "us-east-1")
    client = aws.client("pricing", near, options.credentials)
    with aws.errors(near):
        pages = client.get_paginator("get_products").paginate(
            ServiceCode="AmazonSageMaker",
            Filters=[{"Type": "TERM_MATCH", "Field": "regionCode", "Value": where}],
            PaginationConfig={"MaxItems": _MAX_PRODUCTS},
        )
        products = [product(text) for page in pages for text in page.get("PriceList", ())]
    known = dict(filter(None, products))
    hourly, hosting = _machines(known, "Train:"), _machines(known, "Host:")
    if not hourly:
        raise BackendUnavailable(f"AWS's price list has no training prices for {where}")
    today = dt.datetime.now(dt.UTC).date().isoformat()
    source, disk = "AWS's price list (GetProducts)", known.get("Train:VolumeUsage.gp2", "")
    path = prices.store(PROVIDER, PriceList(where, "USD", today, source, hourly, disk, hosting))
    return f"stored {len(hourly)} prices for {where} as of {today} in {path}"


def _machines(known: Mapping[str, str], component: str) -> dict[str, str]:
    start = f"{component}ml."
    chosen = {name: price for name, price in known.items() if name.startswith(start)}
    return {name.removeprefix(component): price for name, price in chosen.items()}


def product(text: str) -> tuple[str, str] | None:
    """The usage type without its region, and the price in USD, of a product as JSON text.

    None for anything but a price on demand above zero, of training or of an endpoint.
    """
    try:
        data = from_json(text)
        usage = _USAGE.fullmatch(data["product"]["attributes"]["usagetype"])
        amounts = [
            dimension["pricePerUnit"].get("USD")
            for term in data["terms"]["OnDemand"].values()
            for dimension in term["priceDimensions"].values()
        ]
    except (Malformed, KeyError, TypeError, AttributeError):
        return None
    valid = [amount for amount in amounts if prices.is_price(amount) and amount.strip("0.")]
    return (usage[1], valid[0]) if usage and valid else None


def when(plan: Plan) -> Iterator[Start]:
    """What the quotas allow, what spot instances cost, and which training plans are on offer.

    Raises NotPermitted without valid credentials, and BackendUnavailable if AWS cannot be reached.
    """
    quotas: Mapping[str, float] | DeploykitError
    try:
        quotas = _quotas(plan)
    except DeploykitError as error:
        if error.__cause__ is None or aws.code(error.__cause__) not in aws.DENIED:
            aws.account(plan.target, plan.options.credentials)
        quotas = error
    options: Options = plan.options
    for alone in preferred(options):
        yield _quota_start(plan, alone, quotas)
    several = options.instance_groups or options.instance_preferences
    if not (options.spot or options.training_plan or options.keep_alive or several):
        wait = 2 * plan.job.resources.time_limit * (1 + plan.job.retries)
        on_spot = replace(options, spot=True, max_wait=wait)
        settings = {"sagemaker.spot": "true", "sagemaker.max_wait": f"{wait}s"}
        yield _quota_start(plan, on_spot, quotas)._replace(settings=settings)
    if not options.training_plan:
        yield from _plan_starts(plan)


def _quotas(plan: Plan) -> dict[str, float]:
    client: Any = aws.client("service-quotas", plan.target, plan.options.credentials)
    with aws.errors(plan.target):
        pages = client.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
        quotas = [quota for page in pages for quota in page.get("Quotas", ())]
    valid = [quota for quota in quotas if {"QuotaName", "Value"} <= quota.keys()]
    return {quota["QuotaName"]: float(quota["Value"]) for quota in valid}


def _quota_start(
    plan: Plan, options: Options, quotas: Mapping[str, float] | DeploykitError
) -> Start:
    """Whether the quota allows the job with these options; `quotas` may be why it is unknown."""
    where = f"{options.training_type}{' (spot)' * options.spot} in {plan.target}"
    nodes, name = plan.job.resources.nodes, options.quota
    if isinstance(quotas, DeploykitError):
        limit = f"unknown ({quotas.message})"
    elif name not in quotas:
        limit = "not listed"
    elif quotas[name] < nodes:
        reason = f"the quota {name!r} is {quotas[name]:g}, but the job needs {nodes}"
        return Start(where, options, None, reason, possible=False)
    else:
        limit = f"{quotas[name]:g}"
    more = "AWS does not report when instances will be available"
    if options.spot:
        more = _spot_prices(options, plan.target)
    return Start(where, options, None, f"the quota {name!r} is {limit}; {more}")


def _spot_prices(options: Options, where: str) -> str:
    """A sentence about the last prices of spot instances, or why there are none.

    Managed spot training takes spot instances of EC2, whose history is public:
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html
    """
    kind = options.training_type
    name = kind.removeprefix("ml.")
    client: Any = aws.client("ec2", where, options.credentials)
    try:
        with aws.errors(where):
            pages = client.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=[name],
                ProductDescriptions=["Linux/UNIX"],
                StartTime=dt.datetime.now(dt.UTC) - dt.timedelta(days=_SPOT_DAYS),
                PaginationConfig={"MaxItems": _MAX_SPOT_PRICES},
            )
            history = [entry for page in pages for entry in page.get("SpotPriceHistory", ())]
    except DeploykitError as error:
        return f"spot prices are unavailable: {error.message}"
    valid = [e for e in history if prices.is_price(e.get("SpotPrice")) and "Timestamp" in e]
    if not valid:
        return f"EC2 lists no spot prices for {name} in {where} in the last {_SPOT_DAYS} days"
    amounts = [Decimal(entry["SpotPrice"]) for entry in valid]
    newest = {
        entry.get("AvailabilityZone", "-"): Decimal(entry["SpotPrice"])
        for entry in sorted(valid, key=lambda entry: entry["Timestamp"])
    }
    zone = min(newest, key=lambda name: newest[name])
    on_demand = prices.machine(PROVIDER, where, kind)
    share = ""
    if on_demand and on_demand[0].amount:
        share = f", {newest[zone] / on_demand[0].amount:.0%} of SageMaker's on-demand price"
    return (
        f"EC2's spot price for {name} in the last {_SPOT_DAYS} days: "
        f"{money.exact(min(amounts))} to {money.exact(max(amounts))} USD an hour; "
        f"now {money.exact(newest[zone])} in {zone}{share}"
    )


def _plan_starts(plan: Plan) -> Iterator[Start]:
    """When the job would start with each training plan on offer for its machines.

    Machines that are not sold in plans have none. Where AWS refuses to tell, that is the reason.
    """
    options: Options = replace(plan.options, training_plan="on offer")  # its cost is unknown
    client: Any = aws.client("sagemaker", plan.target, options.credentials)
    shape = client.meta.service_model.operation_model(_SEARCH).input_shape
    if options.training_type not in shape.members["InstanceType"].enum:
        return
    try:
        with aws.errors(plan.target):
            response = client.search_training_plan_offerings(
                InstanceType=options.training_type,
                InstanceCount=plan.job.resources.nodes,
                DurationHours=-(-plan.job.resources.time_limit // 3600),
                TargetResources=["training-job"],
            )
    except DeploykitError as error:
        where = f"training plans in {plan.target}"
        yield Start(where, options, None, error.message, possible=False)
        return
    for offer in response["TrainingPlanOfferings"]:
        for part in offer.get("ReservedCapacityOfferings", ())[:1]:
            where = f"training plan in {part.get('AvailabilityZone', plan.target)}"
            yield Start(where, options, part.get("StartTime"), _terms(offer), possible=False)


def _terms(offer: Mapping[str, Any]) -> str:
    fee = (
        f"{offer.get('UpfrontFee', 'an unspecified price')} {offer.get('CurrencyCode', '')}".strip()
    )
    length = f"{offer['DurationHours']} h" if "DurationHours" in offer else "an unspecified time"
    return (
        f"available for {length} at {fee}, paid in advance; run `aws sagemaker "
        f"create-training-plan --training-plan-offering-id {offer['TrainingPlanOfferingId']}`, "
        "then set sagemaker.training_plan"
    )
