"""Patterns of the user's own for lines of the log: the section `metrics` of a job file."""

from __future__ import annotations

import re
from collections.abc import Mapping

from deploykit.job.checks import pattern_problem
from deploykit.observe.metrics.points import count, number
from deploykit.observe.metrics.reading import Reading

POSITIONS = ("step", "total", "epoch", "epochs")
"""Names that say where a run is, and no metric."""


def compiled(patterns: Mapping[str, str]) -> dict[str, re.Pattern[str]]:
    """The patterns that are valid: one regular expression with a group for each name."""
    return {
        name: re.compile(regex) for name, regex in patterns.items() if not pattern_problem(regex)
    }


def read(line: str, patterns: Mapping[str, re.Pattern[str]]) -> Reading | None:
    """The numbers that the patterns find in a line; None where they find none."""
    numbers = {}
    for name, pattern in patterns.items():
        match = pattern.search(line)
        value = number(match[1] or "") if match else None
        if value is not None:
            numbers[name] = value
    if not numbers:
        return None
    values = {name: value for name, value in numbers.items() if name not in POSITIONS}
    return Reading(
        "metrics of the job file",
        values,
        count(numbers.get("step")),
        count(numbers.get("total")),
        epoch=numbers.get("epoch"),
        epochs=count(numbers.get("epochs")),
    )
