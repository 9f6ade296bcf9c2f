"""How a run ended, as the launcher of each node wrote it down (``ends/node-<N>.json``)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from deploykit import parsing

STOPPED = 75
"""Exit code of a trainer that was told to stop, has saved a checkpoint, and can go on from it."""


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
            found.append(_end(parsing.json_of(path)))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # written by something else; whoever asks falls back on the scheduler
    return sorted(found, key=lambda end: (end.exit_code == 0, end.finished))


def restarts(folder: Path, *, upto: int | None = None) -> list[str]:
    """The reasons of the job's restarts, as far as they are known; with `upto`, of the first."""
    found = {}
    for path in folder.glob("ends/restart-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            found[int(path.stem.rpartition("-")[2])] = str(parsing.json_of(path)["why"])
    return [found[number] for number in sorted(found) if upto is None or number <= upto]


def attempt(folder: Path) -> int | None:
    """The number of the attempt that has begun last, from 0; None before the first."""
    try:
        return int(parsing.json_of(folder / "ends" / "attempt.json")["attempt"])
    except (OSError, ValueError, KeyError):
        return None


def _end(data: dict[str, Any]) -> End:
    return End(
        int(data["exit_code"]),
        str(data["reason"]),
        data["rank"],
        datetime.fromisoformat(data["finished"]),
        int(data["attempt"]),
    )
