"""What spot instances of a type have cost in the last days, as EC2 tells.

SageMaker tells no history of its own. Its managed spot training takes spot instances of EC2, whose
prices are those of one market in each zone:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.job_cost import PROVIDER
from deploykit.cost import money, prices
from deploykit.lib.errors import DeploykitError

_DAYS = 7
_SYSTEM = "Linux/UNIX"
_MOST = 20_000
"""Prices that are read: a zone has a few a day."""


def sentence(kind: str, region: str) -> str:
    """One sentence about the prices of ``ml.g5.xlarge`` and its like, or why there are none."""
    name = kind.removeprefix("ml.")
    try:
        history = _prices(name, region)
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


def _prices(name: str, region: str) -> Sequence[Mapping[str, Any]]:
    """The valid prices of the last days. Raises what `aws.errors` raises."""
    client: Any = aws.client("ec2", region)
    with aws.errors(region):
        pages = client.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=[name],
            ProductDescriptions=[_SYSTEM],
            StartTime=dt.datetime.now(dt.UTC) - dt.timedelta(days=_DAYS),
            PaginationConfig={"MaxItems": _MOST},
        )
        every = [one for page in pages for one in page.get("SpotPriceHistory", ())]
    return [one for one in every if prices.is_price(one.get("SpotPrice")) and "Timestamp" in one]


def _amount(one: Mapping[str, Any]) -> Decimal:
    return Decimal(one["SpotPrice"])


def _cheapest(history: Sequence[Mapping[str, Any]]) -> tuple[str, Decimal]:
    """The zone whose newest price is the lowest, and that price."""
    newest = {one.get("AvailabilityZone", "-"): one for one in sorted(history, key=_time)}
    zone = min(newest, key=lambda name: _amount(newest[name]))
    return zone, _amount(newest[zone])


def _time(one: Mapping[str, Any]) -> dt.datetime:
    time: dt.datetime = one["Timestamp"]
    return time


def _beside(price: Decimal, kind: str, region: str) -> str:
    """How much that is of SageMaker's price on demand, if that is known."""
    known = prices.machine(PROVIDER, region, kind)
    if known is None or not known[0].amount:
        return ""
    return f", {price / known[0].amount:.0%} of SageMaker's price on demand"
