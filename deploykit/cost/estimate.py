"""What a job may cost, as a sum of charges that can be shown line by line."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from deploykit.cost import money
from deploykit.lib import units

CASES = ("low", "likely", "worst")


class Seconds(NamedTuple):
    """How long something is billed, in each case; None: without a limit."""

    low: int | None
    likely: int | None
    worst: int | None


class Charge(NamedTuple):
    """Something that is billed by time."""

    what: str
    """``2 x ml.g5.12xlarge, on-demand``."""
    hourly: Decimal
    """Price of an hour of all of it together."""
    seconds: Seconds
    how: str
    """Where the time of the worst case comes from: ``1h 2m x 2 attempts``."""
    discount: Decimal = Decimal(0)
    """The share of the price that may be saved in the low case, 0 to 1."""
    after: bool = False
    """Whether it is billed after the job, so that stopping the job does not save it."""

    def amount(self, case: str) -> Decimal | None:
        """The cost in a case; None without a limit."""
        seconds = getattr(self.seconds, case)
        if seconds is None:
            return None
        share = 1 - self.discount if case == "low" else Decimal(1)
        return money.for_seconds(self.hourly, seconds) * share

    def data(self) -> dict[str, Any]:
        """As JSON."""
        amounts = {case: _number(self.amount(case)) for case in CASES}
        return {"what": self.what, "hourly": money.exact(self.hourly), **amounts}


def _number(amount: Decimal | None) -> float | None:
    return None if amount is None else float(money.cents(amount))


class Estimate(NamedTuple):
    """What a job may cost in the low, the likely and the worst case."""

    charges: tuple[Charge, ...] = ()
    """Empty where nothing is billed, or where a price is unknown."""
    currency: str = ""
    unknown: tuple[str, ...] = ()
    """Prices that are not known, each with what to do about it. The sum is unknown then."""
    free: str = ""
    """Why nothing is billed; empty where something is."""
    source: str = ""
    """Where the prices come from, with their date."""
    notes: tuple[str, ...] = ()
    """What the cases assume, and what is not counted."""
    warnings: tuple[str, ...] = ()

    def amount(self, case: str) -> Decimal | None:
        """The sum of the charges in a case; None where it is unknown or has no limit."""
        amounts = [charge.amount(case) for charge in self.charges]
        known = [amount for amount in amounts if amount is not None]
        if self.unknown or len(known) < len(amounts):
            return None
        return sum(known, Decimal(0))

    @property
    def hourly(self) -> Decimal:
        """Price of an hour while the job runs."""
        return sum((one.hourly for one in self.charges if not one.after), Decimal(0))

    @property
    def always(self) -> Decimal:
        """Price of an hour of what is billed in the likely case."""
        amounts = (one.hourly for one in self.charges if one.seconds.likely)
        return sum(amounts, Decimal(0))

    @property
    def afterwards(self) -> Decimal:
        """The worst cost of what is billed after the job."""
        later = [charge.amount("worst") for charge in self.charges if charge.after]
        return sum((amount for amount in later if amount is not None), Decimal(0))

    def text(self, case: str) -> str:
        """``12.40 USD``, ``unknown`` or ``no limit``."""
        amount = self.amount(case)
        if amount is not None:
            return money.text(amount, self.currency) if self.charges else "0"
        return "unknown" if self.unknown else "no limit"

    def explained(self, case: str = "worst") -> Iterator[str]:
        """Each charge of a case with its sum."""
        for charge in self.charges:
            amount, seconds = charge.amount(case), getattr(charge.seconds, case)
            shown = "no limit" if amount is None else money.text(amount, self.currency)
            time = "no time limit" if seconds is None else f"{seconds} s"
            saved = f" x {1 - charge.discount}" if case == "low" and charge.discount else ""
            price = f"{money.exact(charge.hourly)} {self.currency}/h"
            how = f" ({charge.how})" if case == "worst" else ""
            yield f"{charge.what}: {price} x {time}{how} / 3600{saved} = {shown}"

    def record(self) -> dict[str, str | None] | None:
        """The price that a run folder keeps, for `prices.spent`; None where nothing is known."""
        if self.unknown or not self.charges:
            return None
        worst = self.amount("worst")
        return {
            "hourly": money.exact(self.hourly),
            "currency": self.currency,
            "source": self.source,
            "worst": None if worst is None else str(money.cents(worst)),
        }

    def summary(self) -> str:
        """One line for a dry run: the worst case and what it is made of."""
        if self.unknown:
            return f"cost: unknown ({'; '.join(self.unknown)})"
        parts = [f"{charge.what} x {charge.how}" for charge in self.charges]
        return f"cost: at most {self.text('worst')}: {' + '.join(parts)} ({self.source})"

    def rate(self, time: str) -> str:
        """As `summary`, for what stays: the hour, and `time`, such as ``a month`` or ``in 8h``."""
        if self.unknown:
            return self.summary()
        likely, worst = self.text("likely"), self.text("worst")
        total = likely if likely == worst else f"{likely} to {worst}"
        parts = " + ".join(charge.what for charge in self.charges)
        hour = f"{money.exact(self.always)} {self.currency} an hour"
        return f"cost: {hour}, {total} {time}: {parts} ({self.source})"

    def cases(self) -> dict[str, float | None]:
        """The amount of each case in cents, as JSON; null where unknown or unlimited."""
        return {case: _number(self.amount(case)) for case in CASES}

    def data(self) -> dict[str, Any]:
        """The estimate as JSON: amounts in cents as numbers, null where unknown or unlimited."""
        return {
            **self.cases(),
            "currency": self.currency or None,
            "charges": [charge.data() for charge in self.charges],
            "unknown": list(self.unknown),
            "free": self.free or None,
            "source": self.source or None,
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }


def for_machine(what: str, price: str | None, key: str, limit: int) -> Estimate:
    """A machine with a price per hour, for at most `limit` seconds; 0 is no limit.

    Without a price nothing is billed. `key` is where the price is set.
    """
    if price is None:
        return Estimate(free=f"{key} is not set")
    hour = money.parse(price)
    how = f"1 attempt of {units.exact_span(limit)}" if limit else "no time limit"
    longest = limit or None
    charge = Charge(what, hour.amount, Seconds(longest, longest, longest), how)
    notes = ("low and likely assume one attempt that uses its whole time limit",)
    return Estimate((charge,), hour.currency, source=f"{key}, {price} an hour", notes=notes)
