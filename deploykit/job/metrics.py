"""What is wrong with the section `metrics` of a job: patterns for lines of the log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from deploykit.lib.problem import Problem


def problems(patterns: Mapping[str, str]) -> Iterator[Problem]:
    """Why some of the patterns of a job file are none."""
    for name, regex in patterns.items():
        if message := problem(regex):
            yield Problem(f"metrics.{name}", message, "for example loss: 'loss ([0-9.]+)'")


def problem(regex: str) -> str:
    """Why a text is no pattern, as the end of a sentence; empty if it is one."""
    try:
        groups = re.compile(regex).groups
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {error}"
    return "" if groups else "has no group around the number"
