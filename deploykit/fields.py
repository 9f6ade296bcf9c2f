"""Metadata of the job file's fields, as arguments of ``typing.Annotated``.

One declaration serves four readers: the decoder (`decode.py`), the JSON Schema, the commented
file that ``deploykit init`` writes, and the reference in ``docs/``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Help:
    """The description of a field; `example` is a value as written in the job file."""

    text: str
    example: str | None = None


@dataclass(frozen=True)
class Bounds:
    """The least and greatest value allowed, both included."""

    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class Pattern:
    """Text must fully match `regex`; `meaning` describes it in words."""

    regex: str
    meaning: str


NOT_EMPTY = Pattern(r"[\s\S]+", "a value; omit the key for the default")


@dataclass(frozen=True)
class Quantity:
    """An integer written with a unit: ``30m``, ``4GiB``.

    `parse` turns the written text into the integer and raises ValueError; `regex` is for editors.
    """

    meaning: str
    regex: str
    parse: Callable[[str], int]


_CLOCK = re.compile(r"(?:(\d{1,9})-)?(\d{1,2}):(\d{2}):(\d{2})")
_SPAN = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")
_SIZE = re.compile(r"(\d{1,18})\s*([KMGT]?)(i?)B", re.IGNORECASE)

_LONGEST = 10**9
"""Seconds, about 30 years; more would overflow dates."""


def _seconds(text: str) -> int:
    """``90s``, ``30m``, ``1h30m``, ``2d`` or Slurm's ``1-12:00:00`` in seconds."""
    match = _CLOCK.fullmatch(text) or _SPAN.fullmatch(text)
    if not text or match is None:
        raise ValueError(text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total > _LONGEST:
        raise ValueError(text)
    return total


def _bytes(text: str) -> int:
    """``512MiB``, ``4GiB`` (powers of 1024) or ``4GB`` (powers of 1000) in bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    number, prefix, binary = match.groups()
    power = " KMGT".index(prefix.upper() or " ")
    return int(number) * int((1024 if binary else 1000) ** power)


DURATION = Quantity(
    "a time such as 90s, 30m, 1h30m, 2d or 1-12:00:00",
    r"^(\d+d)?(\d+h)?(\d+m)?(\d+s)?$|^(\d+-)?\d{1,2}:\d{2}:\d{2}$",
    _seconds,
)
SIZE = Quantity("a size such as 512MiB or 4GiB", r"^\d+\s*[KkMmGgTt]?[Ii]?[Bb]$", _bytes)

Duration = Annotated[int, DURATION]
"""Seconds."""
Size = Annotated[int, SIZE]
"""Bytes."""
