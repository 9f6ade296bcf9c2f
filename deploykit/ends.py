"""How a run ended, as the launcher of each node wrote it down (``ends/node-<N>.json``)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class End:
    """The end of one node. `rank` is the first rank that failed there, None where none did."""

    exit_code: int
    reason: str
    rank: int | None
    finished: datetime
    attempt: int


def read(folder: Path) -> list[End]:
    """The ends of all nodes that have ended, failures first, then by time."""
    found = []
    for path in folder.glob("ends/node-*.json"):
        try:
            found.append(_end(json.loads(path.read_text())))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # written by something else; whoever asks falls back on the scheduler
    return sorted(found, key=lambda end: (end.exit_code == 0, end.finished))


def _end(data: dict[str, Any]) -> End:
    return End(
        int(data["exit_code"]),
        str(data["reason"]),
        data["rank"],
        datetime.fromisoformat(data["finished"]),
        int(data["attempt"]),
    )
