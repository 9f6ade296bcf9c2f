"""The data that every reader yields: one number of one step."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

LONGEST_NAME = 100
"""Characters of a metric's name; longer ones are cut."""
STEPS = ("step", "global_step", "_step", "iteration", "iter")
"""Names of the step in documents."""
_NUMBER = re.compile(
    r"[+-]?(?:\d{1,30}(?:,\d{3}){0,9}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,4})?"
    r"|[+-]?(?i:nan|inf(?:inity)?)",
    re.ASCII,
)


class Point(NamedTuple):
    """One value of one metric. The run is that of the folder or log which was read."""

    name: str
    value: float
    step: int | None = None
    """Optimizer steps so far, as the script counts them; None where the source does not tell."""
    epoch: float | None = None
    """In a log counted from 1, or a fraction of all; in a file as the program counts."""
    time: float | None = None
    """Seconds since the epoch; None where the source does not tell."""
    attempt: int | None = None
    """Of the run, from 0; None where the source does not tell."""
    source: str = ""
    """Where it was read: a file relative to the run folder, or ``log (FORMAT)``."""


def number(text: str) -> float | None:
    """A number as programs print it, thousands separated or not; None for any other text."""
    if _NUMBER.fullmatch(text) is None:
        return None
    return float(text.replace(",", ""))


def real(value: object) -> float | None:
    """A number of a decoded document as a float; None for what is none, such as true."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf


def count(value: float | None) -> int | None:
    """A number as a count of steps; None for a negative, fractional or huge one."""
    limit = 10**15
    return int(value) if value is not None and 0 <= value <= limit and value == int(value) else None
