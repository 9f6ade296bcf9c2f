"""What an endpoint costs, and the schedule that deletes it.

Billing: https://docs.aws.amazon.com/sagemaker/latest/dg/deploy-model-options.html; a serverless
endpoint is billed by memory and the time of its requests, others by the hour of each instance.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from deploykit.backends.deployment import Machines, Request
from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.offers import MONTH, PROVIDER, REFRESH
from deploykit.cost import money, prices
from deploykit.cost.estimate import Charge, Estimate, Seconds
from deploykit.cost.prices import Price
from deploykit.lib import units
from deploykit.lib.errors import SubmitRefused

_MB = 1024
_BATCH = (
    "the run time of a batch job is not known in advance; AWS's pricing page shows the hourly "
    "price of its instances"
)
_NOT_COUNTED = "not included: disks, requests and their data, S3, CloudWatch, taxes"
TAG = "deploykit:run"
"""Of each endpoint, with the run whose model it serves."""
SCHEDULER = "scheduler"
_TARGET = "aws-sdk:sagemaker:deleteEndpoint"
_RETRIES = {"MaximumEventAgeInSeconds": 86400, "MaximumRetryAttempts": 185}
"""The service's defaults: an endpoint that is being created or updated cannot be deleted yet."""


def estimate(
    machines: Sequence[Machines],
    region: str,
    seconds: int | None = None,
    *,
    batch: bool = False,
) -> Estimate:
    """What an endpoint on these machines costs in `seconds`; by default in a month.

    Low and likely: the instances at the start, and no request of a serverless endpoint. Worst: all
    instances of autoscaling, or as many requests at the same time as the endpoint takes.
    """
    if batch:
        return Estimate(unknown=(_BATCH,))
    time = MONTH * money.HOUR if seconds is None else seconds
    how = f"a month of {MONTH} hours" if seconds is None else units.exact_span(seconds)
    used, unknown, charges = list[Price](), list[str](), list[Charge]()
    for each in machines:
        known = _instances(each, region) if each.instance_type else _serverless(each, region)
        if isinstance(known, str):
            unknown.append(known)
            continue
        used.append(known.price)
        for what, hourly, always in known.parts:
            billed = time if always else 0
            charges.append(Charge(what, hourly, Seconds(billed, billed, time), how))
    days = sorted({price.day for price in used})
    old = prices.old(used, dt.datetime.now(dt.UTC).date())
    return Estimate(
        charges=() if unknown else tuple(charges),
        currency="USD",
        unknown=tuple(dict.fromkeys(unknown)),
        source=f"AWS prices as of {days[0]}" if days else "",
        notes=(_NOT_COUNTED,),
        warnings=(old,) if old else (),
    )


class _Known(NamedTuple):
    price: Price
    parts: Sequence[tuple[str, Decimal, bool]]
    """What is billed, its price of an hour, and whether it is billed all the time."""


def _instances(machines: Machines, region: str) -> _Known | str:
    """The charges of a variant on instances, or the price that is missing."""
    kind, count = machines.instance_type, machines.instances
    more = machines.most - count
    priced = prices.hosting(PROVIDER, region, kind)
    if priced is None:
        return f"no price is known for an endpoint on {kind} in {region}; {REFRESH}"
    price = priced[0]
    parts = [(f"{count} x {kind}", count * price.amount, True)]
    if more > 0:
        parts.append((f"up to {more} more with autoscaling", more * price.amount, False))
    return _Known(price, parts)


def _serverless(machines: Machines, region: str) -> _Known | str:
    """The charges of a serverless variant, or the price that is missing."""
    if machines.instances:
        return "no price is known for provisioned concurrency; see AWS's pricing page"
    priced = prices.serverless(PROVIDER, region)
    if priced is None:
        return f"no price is known for serverless endpoints in {region}; see AWS's pricing page"
    second = priced[0].amount * machines.memory / _MB
    requests = units.plural(machines.most, "concurrent request")
    what = f"{money.exact(second)} USD per second of each request, at most {requests}"
    return _Known(priced[0], [(what, machines.most * second * money.HOUR, False)])


def schedule(name: str, role: str, seconds: int) -> Request:
    """The request for a schedule that deletes an endpoint in `seconds` from now, and then itself.

    https://docs.aws.amazon.com/scheduler/latest/UserGuide/managing-targets-universal.html
    """
    partition, now = role.split(":")[1], dt.datetime.now(dt.UTC)
    at = now + dt.timedelta(seconds=seconds)
    return Request(
        SCHEDULER,
        "CreateSchedule",
        {
            "Name": name,
            "Description": f"Deletes the endpoint {name}, created by `deploykit deploy --for`",
            "ScheduleExpression": f"at({at:%Y-%m-%dT%H:%M:%S})",
            "ScheduleExpressionTimezone": "UTC",
            "FlexibleTimeWindow": {"Mode": "OFF"},
            "ActionAfterCompletion": "DELETE",
            "Target": {
                "Arn": f"arn:{partition}:{SCHEDULER}:::{_TARGET}",
                "RoleArn": role,
                "Input": json.dumps({"EndpointName": name}),
                "RetryPolicy": _RETRIES,
            },
        },
    )


def deletes(described: Mapping[str, Any], name: str) -> bool:
    """Whether a schedule, as a request or a description, is one that deletes this endpoint."""
    target = described.get("Target") or {}
    arn, given = str(target.get("Arn", "")), str(target.get("Input", ""))
    return arn.endswith(f":::{_TARGET}") and given == json.dumps({"EndpointName": name})


def due(described: Mapping[str, Any]) -> float | None:
    """When a schedule deletes its endpoint, in seconds since the epoch; None for another form."""
    text = str(described.get("ScheduleExpression", ""))
    try:
        at = dt.datetime.strptime(text, "at(%Y-%m-%dT%H:%M:%S)").replace(tzinfo=dt.UTC)
    except ValueError:
        return None
    return at.timestamp()


def end(request: Request) -> float | None:
    """When a request of a plan lets an endpoint be deleted; None for another request."""
    return due(request.parameters) if request.service == SCHEDULER else None


def described(client: Any, target: str, name: str) -> dict[str, Any] | None:
    """The schedule of this name; None if there is none. Raises what `aws.errors` raises."""
    with aws.errors(target):
        try:
            return dict(client.get_schedule(Name=name))
        except client.exceptions.ResourceNotFoundException:
            return None


def send_schedule(client: Any, target: str, request: Request) -> None:
    """Create the schedule of an endpoint, or change the one that it has.

    Raises SubmitRefused if the name belongs to a schedule that does something else.
    """
    name = request.parameters["Name"]
    existing = described(client, target, name)
    if existing is not None and not deletes(existing, name):
        raise SubmitRefused(
            f"a schedule {name} already exists in {target} and does not delete this endpoint",
            hint="choose another sagemaker.deploy.name",
        )
    with aws.errors(target):
        if existing is None:
            client.create_schedule(**request.parameters)
        else:
            client.update_schedule(**request.parameters)


def remove_schedule(client: Any, target: str, name: str) -> None:
    """Delete the schedule of an endpoint that is gone; it is no error if there is none."""
    existing = described(client, target, name)
    if existing is None or not deletes(existing, name):
        return
    with aws.errors(target):
        try:
            client.delete_schedule(Name=name)
        except client.exceptions.ResourceNotFoundException:
            return
