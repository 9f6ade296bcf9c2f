"""Ask AWS's price list for what training costs in a region, and keep the answer.

https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html. Of an
unexpected answer only what is understood counts.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from deploykit.backends.sagemaker import aws
from deploykit.backends.sagemaker.job_cost import PROVIDER
from deploykit.cost import prices
from deploykit.cost.prices import PriceList
from deploykit.job.decode import Malformed, from_json
from deploykit.lib.errors import BackendUnavailable, UsageError

_SERVICE = "AmazonSageMaker"
_ENDPOINTS = {"ap": "ap-south-1", "eu": "eu-central-1"}
"""Regions of the service, by the beginning of a near region; else us-east-1:
https://docs.aws.amazon.com/general/latest/gr/billing.html"""
_SOURCE = "AWS's price list (GetProducts)"
_USAGE = re.compile(r"(?:[A-Z0-9]+-)?Train:(ml\.[a-z0-9-]+\.[a-z0-9]+|VolumeUsage\.gp[23])")
"""The usage type of a product: ``USE1-Train:ml.g5.xlarge``."""
_MOST = 200
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
    path = prices.store(PROVIDER, PriceList(region, "USD", today, _SOURCE, machines, disk))
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
            ServiceCode=_SERVICE, Filters=filters, PaginationConfig={"MaxItems": _MOST * 100}
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
        price = next(_prices(data["terms"]["OnDemand"]), None)
    except (Malformed, KeyError, TypeError, AttributeError):
        return None
    if usage is None or price is None:
        return None
    return Product(usage[1], price)


def _prices(terms: Mapping[str, Any]) -> Iterator[str]:
    """The prices in USD of on-demand terms, those above zero."""
    for term in terms.values():
        for dimension in term["priceDimensions"].values():
            price = dimension["pricePerUnit"].get("USD")
            if prices.is_price(price) and price.strip("0."):
                yield price
