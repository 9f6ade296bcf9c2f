"""What a check says: one fault, its evidence, and the exact fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "unseen", "warning", "note"]
_ORDER: tuple[Severity, ...] = ("error", "unseen", "warning", "note")


@dataclass(frozen=True)
class Fix:
    """What to do, in a sentence; where it is a change of infrastructure, in three languages."""

    say: str
    cli: str = ""
    """A shell script of AWS CLI commands, or of this system's own."""
    cloudformation: str = ""
    terraform: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Keys of the job file with new values, as ``--set`` takes them."""


@dataclass(frozen=True)
class Finding:
    """One thing that will stop the job (error), that could not be looked at (unseen), that may
    stop or slow it (warning), or that is worth knowing (note).
    """

    fault: str
    severity: Severity
    message: str
    evidence: tuple[str, ...]
    fix: Fix


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; among equals as they came."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def wrong(findings: Iterable[Finding]) -> bool:
    """Whether something will stop the job, or could not be looked at."""
    return any(finding.severity in {"error", "unseen"} for finding in findings)
