"""What one line of a log tells, whatever prints it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

LONGEST = 4096
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
