"""How long the rest of a run takes, from the times at which it reached its steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_RECENT = 0.5
"""The share of the time so far over which the pace is taken: it may change."""
_FEW = 2
"""Marks that make a difference."""

Marks = Sequence[tuple[float, float]]
"""Times in seconds and the counts reached then; both grow."""


def rate(marks: Marks) -> float | None:
    """The growth in a second, over the last part of the time; None where it is not known."""
    if len(marks) < _FEW:
        return None
    end, at = marks[-1]
    since = end - (end - marks[0][0]) * _RECENT
    start, was = next((pair for pair in reversed(marks[:-1]) if pair[0] <= since), marks[0])
    return (at - was) / (end - start) if end > start else None


def longest_gap(marks: Marks) -> float:
    """Seconds between two marks at most."""
    return max((after[0] - before[0] for before, after in itertools.pairwise(marks)), default=0.0)


def by_epochs(marks: Marks, end: float, each: float) -> float | None:
    """Seconds from the last mark to the end of an epoch at `end`, of epochs of `each` steps.

    The pace within epochs, and the time that an evaluation or checkpoint takes after each, are
    told apart: at half time one more or one less of these is yet to come. The first step counts
    for neither, as it may compile. None before the first epoch has ended, or with too few marks.
    """
    at = marks[-1][1] if marks else 0.0
    ended = math.ceil(at / each) - 1
    spans = list(itertools.pairwise(marks))[1:]
    within = [span for span in spans if not _ends(span, each)]
    recent = [span for span in within if span[0][0] >= _since(marks)] or within
    steps = sum(after[1] - before[1] for before, after in recent)
    if ended < 1 or not steps:
        return None
    pause = sum(after[0] - before[0] for before, after in recent) / steps
    across = [(span, ends) for span in spans if (ends := _ends(span, each)) and ends[-1] <= ended]
    extra = sum(
        after[0] - before[0] - (after[1] - before[1]) * pause for (before, after), _ in across
    )
    seen = {number for _, ends in across for number in ends}
    boundary = max(0.0, extra / len(seen)) if seen else 0.0
    return (end - at) * pause + (math.ceil(end / each) - ended) * boundary


def _since(marks: Marks) -> float:
    end = marks[-1][0]
    return end - (end - marks[0][0]) * _RECENT


def _ends(span: tuple[tuple[float, float], tuple[float, float]], each: float) -> range:
    """The numbers of the epochs whose ends lie between two marks or at one of them."""
    (_, before), (_, after) = span
    return range(max(1, math.ceil(before / each)), math.floor(after / each) + 1)
