"""What SageMaker will do with a job: as asked, something else, nothing, or nobody can know.

The rules stand as tables, one file for each part of a job. Each has the reason, the source, the
nearest setting that works, and jobs that show it: the reference page and a test per row are made
of these. Pure: nobody is asked.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass

from deploykit.backends.sagemaker.options import Options
from deploykit.backends.sagemaker.oracle import (
    containers,
    data,
    data_parallel,
    launching,
    machines,
    model_parallel,
    service,
)
from deploykit.backends.sagemaker.oracle.rule import Case, Row, Rule, Sdk, Verdict
from deploykit.model import JobSpec, Problem

RULES: dict[str, tuple[Rule, ...]] = {
    "What starts the ranks": launching.RULES,
    "The data parallel library": data_parallel.RULES,
    "The model parallel library": model_parallel.RULES,
    "Images": containers.RULES,
    "Machines": machines.RULES,
    "Time, money and network": service.RULES,
    "Data and secrets": data.RULES,
}
"""All rules, under the headings of the reference."""


@dataclass(frozen=True)
class Finding:
    """A rule that applies to a job, in words."""

    rule: Rule
    path: str
    reason: str
    nearest: str | None

    def problem(self) -> Problem | None:
        """What `check` reports; None where the job simply runs as asked."""
        if self.rule.severity is None:
            return None
        return Problem(
            self.path,
            self.reason,
            self.nearest,
            severity=self.rule.severity,
            source=self.rule.source,
        )


def ask(job: JobSpec, options: Options, today: dt.date | None = None) -> Iterator[Finding]:
    """Every rule that applies. `today` decides which images still get patches."""
    case = Case(job, options, today or dt.datetime.now(tz=dt.UTC).date())
    for rules in RULES.values():
        for rule in rules:
            yield from _findings(rule, case)


def _findings(rule: Rule, case: Case) -> Iterator[Finding]:
    if rule.when is None:
        return
    found = rule.when(case)
    items = [""] if found is True else found or []
    for item in items:
        words = {"case": case, "job": case.job, "options": case.options, "item": item}
        nearest = rule.nearest and rule.nearest.format(**words)
        yield Finding(rule, rule.path.format(**words), rule.reason.format(**words), nearest)


__all__ = ["RULES", "Case", "Finding", "Row", "Rule", "Sdk", "Verdict", "ask"]
