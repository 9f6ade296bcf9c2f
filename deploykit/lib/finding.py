"""The result of a check: what is wrong, the evidence, and the exact fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "unchecked", "warning", "note"]
_ORDER: tuple[Severity, ...] = ("error", "unchecked", "warning", "note")


@dataclass(frozen=True)
class Fix:
    """What to do, in one sentence; for a change of infrastructure, also as code."""

    summary: str
    cli: str = ""
    """A shell script: commands of the AWS CLI or of this machine."""
    terraform: str = ""
    """The same for Terraform; empty if it cannot express the fix."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Keys of the job file with new values, as ``--set`` takes them."""


@dataclass(frozen=True)
class Finding:
    """One result of a check, with a severity.

    error: the job will fail. unchecked: the check could not run. warning: the job may fail or be
    slow. note: good to know.
    """

    code: str
    """A stable name such as ``efa_inbound``, for scripts."""
    severity: Severity
    message: str
    evidence: tuple[str, ...]
    fix: Fix


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Sort the most severe first; findings of equal severity keep their order."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def count(findings: Iterable[Finding]) -> str:
    """The number of findings of each severity: ``1 error, 2 warnings``; notes do not count."""
    numbers = Counter(finding.severity for finding in findings)
    plurals: dict[Severity, str] = {"error": "s", "unchecked": "", "warning": "s"}
    parts = [
        f"{numbers[severity]} {severity}{plural if numbers[severity] > 1 else ''}"
        for severity, plural in plurals.items()
        if numbers[severity]
    ]
    return ", ".join(parts) or "no problems found"


def blocks(findings: Iterable[Finding]) -> bool:
    """Whether any finding is an error or could not be checked."""
    return any(finding.severity in {"error", "unchecked"} for finding in findings)
