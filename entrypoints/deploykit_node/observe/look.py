"""Whether ranks wait or compute, from two looks at them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit_node import records

_BUSY = 0.05
"""Share of a core above which a process computes."""
_WAITING = ("/torch/distributed/",)
"""Files in whose functions a process waits, although it may use a core: NCCL spins."""


@dataclass(frozen=True)
class Look:
    """The stacks in a folder, and the CPU time of each process until then, in seconds."""

    moment: float
    folder: Path
    cpu: dict[int, float]

    def computes_since(self, before: Look) -> bool:
        """Whether any rank, or a process of it, has computed since the look before.

        On a machine with too few cores it may only have been ready to.
        """
        seconds = max(self.moment - before.moment, 0.1)
        seen = _processes(self.folder)
        busy = {
            pid for pid, cpu in self.cpu.items() if cpu - before.cpu.get(pid, cpu) > _BUSY * seconds
        }
        busy |= {pid for pid, one in seen.items() if one["state"] == "R"}
        return any(not _waits(seen.get(pid)) for pid in busy)


def _waits(process: dict[str, Any] | None) -> bool:
    """Whether the innermost Python call is one that waits for other ranks."""
    if not process or not process["threads"]:
        return False
    calls = [frame["file"] for frame in process["threads"][0]["frames"]]
    return any(part in file for file in calls[:1] for part in _WAITING)


def _processes(folder: Path) -> dict[int, dict[str, Any]]:
    """The processes in a dump, by their id."""
    nodes = [records.read(path) or {} for path in folder.glob("*.json")]
    ranks: list[dict[str, Any]] = [rank for node in nodes for rank in node.get("ranks", ())]
    return {one["pid"]: one for rank in ranks for one in (rank["process"], *rank["children"])}
