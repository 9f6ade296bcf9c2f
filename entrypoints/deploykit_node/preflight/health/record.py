"""What the checks of one node find."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Health:
    """What the checks have found on this node."""

    faults: list[tuple[str, bool]] = field(default_factory=list)
    """Each a sentence without its subject, and whether the job must not start."""
    speeds: dict[str, float] = field(default_factory=dict)
    """By what was measured; larger is better. They are compared with the other nodes'."""
    counts: dict[str, int] = field(default_factory=dict)
    """What must be the same on all nodes, by its name."""
    skipped: list[str] = field(default_factory=list)
    """Checks that could not run, and why."""

    def record(self) -> dict[str, Any]:
        """For the report of this node."""
        faults = [list(fault) for fault in self.faults]
        return {
            "faults": faults,
            "speeds": dict(self.speeds),
            "counts": dict(self.counts),
            "skipped": list(self.skipped),
        }
