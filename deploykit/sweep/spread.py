"""How far repeated runs of a trial differ: mean, standard deviation, and a 95% interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

_TAIL = 0.975
"""Of Student's t distribution: 2.5% are left out at each end."""


class Spread(NamedTuple):
    """Values of the same trial with different seeds."""

    values: Sequence[float]
    mean: float
    sd: float
    """The standard deviation of the sample, with n - 1."""
    low: float
    """The mean lies between `low` and `high` with 95% confidence, if values are about normal."""
    high: float

    def overlaps(self, other: Spread) -> bool:
        """Whether the intervals have values in common, so that chance may be the difference."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        count = len(self.values)
        return f"95%: {self.low:.6g} to {self.high:.6g} ({count} runs, sd {self.sd:.3g})"


def of(values: Sequence[float]) -> Spread | None:
    """The spread of two values or more; None of fewer."""
    if len(values) < 2:  # noqa: PLR2004 - one value has no deviation
        return None
    from scipy.special import stdtrit  # only repeated trials need it

    mean, sd = fmean(values), stdev(values)
    half = float(stdtrit(len(values) - 1, _TAIL)) * sd / math.sqrt(len(values))
    return Spread(tuple(values), mean, sd, mean - half, mean + half)
