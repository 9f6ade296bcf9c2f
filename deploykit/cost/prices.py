"""Lists of prices: those that ship with deploykit, and those that were asked for later.

A list says where each price comes from and of which day it is. Prices that were asked for
(``deploykit cost --refresh``) are kept in the state folder and win over shipped ones.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.job.decode import Malformed, read_json
from deploykit.lib import paths

STALE = 60
"""Days after which a price is called old."""
_HIGHEST = Decimal(10) ** 9


class Price(NamedTuple):
    """The price of an hour, or of a gigabyte for a month, with its day and source."""

    amount: Decimal
    day: str
    """ISO 8601; empty where it is not known."""
    source: str

    def age(self, today: dt.date) -> int | None:
        """Days since its day; None where that is not known."""
        try:
            return (today - dt.date.fromisoformat(self.day)).days
        except ValueError:
            return None


@dataclass(frozen=True)
class PriceList:
    """Prices of one region of one provider, from one source."""

    region: str
    currency: str
    day: str
    source: str
    hourly: Mapping[str, str]
    """Price of an hour, by machine, as decimal text."""
    storage: str = ""
    """Price of a gigabyte of disk for a month; empty where it is unknown."""


@functools.cache
def shipped(provider: str) -> list[PriceList]:
    """The lists that ship with deploykit, for example of ``sagemaker``."""
    import tomllib

    tree = tomllib.loads((Path(__file__).parent / f"{provider}.toml").read_text(encoding="utf-8"))
    lists = (_list(one) for one in tree["list"])
    return [one for one in lists if one is not None]


def stored(provider: str, region: str) -> PriceList | None:
    """The list that was asked for last; None without a valid one."""
    try:
        return _list(read_json(_path(provider, region)))
    except (OSError, Malformed):
        return None


def store(provider: str, prices: PriceList) -> Path:
    """Keep a list that was asked for. Returns its file."""
    path = _path(provider, prices.region)
    paths.private_folder(path.parent)
    paths.write(path, json.dumps(asdict(prices), indent=1) + "\n")
    return path


def _path(provider: str, region: str) -> Path:
    return paths.state() / "prices" / f"{provider}-{region}.json"


def machine(provider: str, region: str, name: str) -> tuple[Price, str] | None:
    """The price of an hour of a machine and its currency; None where no list has it."""
    return _find(provider, region, lambda prices: prices.hourly.get(name, ""))


def storage(provider: str, region: str) -> tuple[Price, str] | None:
    """The price of a gigabyte of disk for a month and its currency; None where unknown."""
    return _find(provider, region, lambda prices: prices.storage)


def _find(provider: str, region: str, written: Any) -> tuple[Price, str] | None:
    """The newest price: one that was asked for is newer than what has shipped."""
    own = stored(provider, region)
    for prices in [own] if own else []:
        if is_price(text := written(prices)):
            return Price(Decimal(text), prices.day, prices.source), prices.currency
    lists = [one for one in shipped(provider) if one.region == region]
    for prices in sorted(lists, key=lambda one: one.day, reverse=True):
        if is_price(text := written(prices)):
            return Price(Decimal(text), prices.day, prices.source), prices.currency
    return None


def _list(data: object) -> PriceList | None:
    """A list as data; None where it is not valid: a file may be edited."""
    match data:
        case {
            "region": str(region),
            "currency": str(currency),
            "day": str(day),
            "source": str(source),
            "hourly": dict(hourly),
            **others,
        }:
            own = {str(name): str(price) for name, price in hourly.items() if is_price(price)}
            disk = others.get("storage", "")
            return PriceList(
                *(region, currency, day, source, own), disk if isinstance(disk, str) else ""
            )
    return None


def is_price(text: object) -> bool:
    """Whether a text is a usable price."""
    if not isinstance(text, str) or len(text) > len(str(_HIGHEST)) * 3:
        return False
    try:
        price = Decimal(text)
    except InvalidOperation:
        return False
    return price.is_finite() and 0 <= price <= _HIGHEST


def old(prices: list[Price], today: dt.date) -> str:
    """A warning about prices that are older than `STALE` days; empty where none is."""
    aged = [(price.age(today), price) for price in prices]
    worst = max((pair for pair in aged if pair[0] is not None), default=None)
    if worst is None or worst[0] is None or worst[0] <= STALE:
        return ""
    return f"prices of {worst[1].day} are {worst[0]} days old; `deploykit cost --refresh`"
