"""Lists of prices, shipped with deploykit or fetched later, and what a run has cost.

A list states the source and the day of its prices. Fetched prices (``deploykit cost --refresh``)
are kept in the state folder and win over shipped ones.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.cost import money
from deploykit.job.decode import Malformed, read_json
from deploykit.lib import paths

MAX_DAYS = 60
"""After which a price is called old."""
_MAX_PRICE = Decimal(10) ** 9


class Price(NamedTuple):
    """A price, such as that of an hour of a machine, with its day and source."""

    amount: Decimal
    day: str
    """ISO 8601; empty where it is not known."""
    source: str


class PriceList(NamedTuple):
    """Prices of one region of one provider, from one source."""

    region: str
    currency: str
    day: str
    source: str
    hourly: Mapping[str, str] = {}
    """Price of an hour of a job, by machine, as decimal text."""
    storage: str = ""
    """Price of a gigabyte of disk for a month; empty where it is unknown."""
    hosting: Mapping[str, str] = {}
    """Price of an hour of an endpoint, by machine."""
    serverless: str = ""
    """Price of a gigabyte of memory for a second of a request; empty where it is unknown."""


@functools.cache
def shipped(provider: str) -> list[PriceList]:
    """The lists that ship with deploykit, for example of ``sagemaker``."""
    tree = tomllib.loads((Path(__file__).parent / f"{provider}.toml").read_text(encoding="utf-8"))
    return [PriceList(**prices) for prices in tree["list"]]


def stored(provider: str, region: str) -> PriceList | None:
    """The list that was fetched last; None if there is none."""
    try:
        return PriceList(**read_json(_path(provider, region)))
    except (OSError, Malformed, TypeError):
        return None


def store(provider: str, prices: PriceList) -> Path:
    """Keep a list that was fetched. Returns its file."""
    path = _path(provider, prices.region)
    paths.private_folder(path.parent)
    paths.write(path, json.dumps(prices._asdict(), indent=1) + "\n")
    return path


def _path(provider: str, region: str) -> Path:
    return paths.state() / "prices" / f"{provider}-{region}.json"


def machine(provider: str, region: str, name: str) -> tuple[Price, str] | None:
    """The price of an hour of a machine and its currency; None where no list has it."""
    return _find(provider, region, lambda prices: prices.hourly.get(name, ""))


def hosting(provider: str, region: str, name: str) -> tuple[Price, str] | None:
    """As `machine`, for a machine of an endpoint."""
    return _find(provider, region, lambda prices: prices.hosting.get(name, ""))


def serverless(provider: str, region: str) -> tuple[Price, str] | None:
    """The price of a gigabyte-second of a serverless endpoint and its currency."""
    return _find(provider, region, lambda prices: prices.serverless)


def storage(provider: str, region: str) -> tuple[Price, str] | None:
    """The price of a gigabyte of disk for a month and its currency; None where unknown."""
    return _find(provider, region, lambda prices: prices.storage)


def _find(
    provider: str, region: str, choose: Callable[[PriceList], str]
) -> tuple[Price, str] | None:
    """The newest price: a fetched one is newer than those that ship."""
    lists = [prices for prices in shipped(provider) if prices.region == region]
    lists.sort(key=lambda prices: prices.day, reverse=True)
    if fetched := stored(provider, region):
        lists.insert(0, fetched)
    for prices in lists:
        if is_price(text := choose(prices)):
            return Price(Decimal(text), prices.day, prices.source), prices.currency
    return None


def is_price(text: object) -> bool:
    """Whether a text is a usable price."""
    try:
        return isinstance(text, str) and 0 <= Decimal(text) <= _MAX_PRICE
    except InvalidOperation:
        return False


def old(prices: list[Price], today: dt.date) -> str:
    """A warning about prices older than `MAX_DAYS`; empty if there are none."""
    days = [price.day for price in prices if price.day]
    age = (today - dt.date.fromisoformat(min(days))).days if days else 0
    if age <= MAX_DAYS:
        return ""
    return f"prices from {min(days)} are {age} days old; run `deploykit cost --refresh`"


class Spent(NamedTuple):
    """What a run has cost so far, or in all."""

    amount: Decimal
    currency: str
    seconds: float
    """Those that are billed."""
    hourly: Decimal
    source: str
    """Where the price comes from."""

    @property
    def total(self) -> str:
        """``12.40 USD``."""
        return money.text(self.amount, self.currency)

    def data(self) -> dict[str, Any]:
        """As JSON: the amount in cents as a number."""
        return {
            "amount": float(money.cents(self.amount)),
            "currency": self.currency,
            "billed_seconds": round(self.seconds, 3),
            "hourly": money.exact(self.hourly),
            "source": self.source,
        }

    def __str__(self) -> str:
        hourly = f"{money.exact(self.hourly)} {self.currency}/h"
        return f"{self.total}: {self.seconds:.0f} s at {hourly} ({self.source})"


def spent(path: Path, seconds: float | None) -> Spent | None:
    """What a run has cost by the price in that file (`Estimate.record`) and the billed seconds, of
    which a part counts as one; None: unknown.
    """
    if seconds is None:
        return None
    try:
        price = read_json(path)
        hourly, currency, source = Decimal(price["hourly"]), price["currency"], price["source"]
    except (OSError, Malformed, LookupError, TypeError, ArithmeticError):
        return None
    amount = money.for_seconds(hourly, math.ceil(seconds))
    return Spent(amount, currency, seconds, hourly, source)
