"""Amounts of money. All arithmetic is decimal: a binary fraction cannot hold 0.10."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal
from typing import NamedTuple

from deploykit.job.model import MONEY

CENT = Decimal("0.01")
HOUR = 3600
"""Seconds."""


class Money(NamedTuple):
    """An amount in a currency, by its code of ISO 4217."""

    amount: Decimal
    currency: str

    def __str__(self) -> str:
        return text(self.amount, self.currency)


def parse(written: str) -> Money:
    """``50 USD`` or ``0.25EUR``. Raises ValueError."""
    if re.fullmatch(MONEY.regex, written) is None:
        raise ValueError(f"expected {MONEY.meaning}")
    return Money(Decimal(written[:-3].strip()), written[-3:])


def cents(amount: Decimal) -> Decimal:
    """The amount in whole cents, rounded half up."""
    return amount.quantize(CENT, ROUND_HALF_UP)


def text(amount: Decimal, currency: str) -> str:
    """``12.40 USD``."""
    return f"{cents(amount):,} {currency}"


def exact(amount: Decimal) -> str:
    """A price with all its digits, at least two after the point: ``0.2312``, ``14.18``."""
    digits = f"{amount:f}"
    whole, _, rest = digits.partition(".")
    return f"{whole}.{rest.rstrip('0').ljust(2, '0')}"


def for_seconds(hourly: Decimal, seconds: int | Decimal) -> Decimal:
    """What `seconds` cost at a price per hour."""
    return hourly * Decimal(seconds) / HOUR
