"""What a run did cost: its price when it was sent, times the seconds that are billed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from deploykit.cost import money, prices
from deploykit.job.decode import Malformed, read_json


@dataclass(frozen=True)
class Spent:
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
        """The same as JSON: the amount in cents as a number."""
        return {
            "amount": float(money.cents(self.amount)),
            "currency": self.currency,
            "billed_seconds": round(self.seconds, 3),
            "hourly": money.exact(self.hourly),
            "source": self.source,
        }

    def __str__(self) -> str:
        each = f"{money.exact(self.hourly)} {self.currency}/h"
        return f"{self.total}: {self.seconds:.0f} s at {each} ({self.source})"


def read(path: Path, seconds: float | None) -> Spent | None:
    """What a run cost by the price in that file and the seconds that are billed; None: unknown."""
    if seconds is None:
        return None
    try:
        data = read_json(path)
    except (OSError, Malformed):
        return None
    match data:
        case {"hourly": str(hourly), "currency": str(currency), "source": str(source)}:
            if prices.is_price(hourly):
                each = Decimal(hourly)
                return Spent(_amount(each, seconds), currency, seconds, each, source)
    return None


def _amount(hourly: Decimal, seconds: float) -> Decimal:
    """What that many billed seconds cost; a part of a second counts as one."""
    return money.for_seconds(hourly, math.ceil(seconds))
