"""The data that every reader of metrics yields: one number of one step, and what one line tells."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
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
    rank: int | None = None
    """The rank whose line of a log it was, if known: values of the lowest one replace others."""


class Value(NamedTuple):
    """One value of a metric, as trackers get it."""

    name: str
    value: float
    step: int
    time: float | None
    """Seconds since the epoch; None where it is not known."""


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


LONGEST_LINE = 4096
"""Characters of a line that are read."""


class Reading(NamedTuple):
    """The numbers of one line. What it does not tell is None."""

    format: str
    """What prints such lines, for people: ``tqdm``."""
    values: Mapping[str, float] = MappingProxyType({})
    """Metrics by name."""
    step: int | None = None
    total: int | None = None
    """The last step, of the run or, with `in_epoch`, of the epoch."""
    in_epoch: bool = False
    """Whether `step` and `total` count within the epoch."""
    epoch: float | None = None
    epochs: int | None = None
    rate: float | None = None
    """Steps a second."""
    elapsed: float | None = None
    """Seconds since step 0, as a progress bar counts them."""
    left: float | None = None
    """Seconds to `total`."""
    title: str | None = None
    """What stands before a progress bar, which may be empty; None: this is no bar."""


def seconds(clock: str) -> float | None:
    """``01:05`` or ``2:00:05`` in seconds; None for another text."""
    parts = clock.split(":")
    if not 2 <= len(parts) <= 3 or not all(part.isascii() and part.isdigit() for part in parts):  # noqa: PLR2004 - minutes, and hours
        return None
    total = 0
    for part in parts:
        total = total * 60 + int(part[:9])
    return float(total)


SAGEMAKER_SOURCE = "SageMaker (FinalMetricDataList)"


def final_metrics(listed: object) -> Iterator[Point]:
    """A point for each metric of a response; what is no such list has none."""
    for one in listed if isinstance(listed, list) else []:
        match one:
            case {"MetricName": str(name), "Value": value, **rest}:
                number, when = real(value), rest.get("Timestamp")
                time = when.timestamp() if isinstance(when, datetime) else None
                if number is not None:
                    yield Point(name[:LONGEST_NAME], number, time=time, source=SAGEMAKER_SOURCE)
