"""How a run ended, as the launcher of each node wrote it down (``exit_records/node-<N>.json``)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploykit import parsing
from deploykit.decode import whole

STOPPED = 75
"""Exit code of a trainer that was told to stop, has saved a checkpoint, and can go on from it."""

_LONGEST = 1 << 20
"""Bytes of a record that are read; it has one line."""
_LAST_CODE = 255


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
    found = [_end(_record(path)) for path in folder.glob("exit_records/node-*.json")]
    known = [end for end in found if end is not None]  # whoever asks falls back on the scheduler
    return sorted(known, key=lambda end: (end.exit_code == 0, end.finished))


def restarts(folder: Path, *, upto: int | None = None) -> list[str]:
    """The reasons of the job's restarts, as far as they are known; with `upto`, of the first."""
    found: dict[int, str] = {}
    for path in folder.glob("exit_records/restart-*.json"):
        number, why = whole(path.stem.rpartition("-")[2]), _record(path).get("why")
        if number is not None and isinstance(why, str):
            found[number] = why
    return [found[number] for number in sorted(found) if upto is None or number <= upto]


def attempt(folder: Path) -> int | None:
    """The number of the attempt that has begun last, from 0; None before the first."""
    number = _record(folder / "exit_records" / "attempt.json").get("attempt")
    return number if isinstance(number, int) else None


def _record(path: Path) -> dict[str, Any]:
    """What a launcher has written there; nothing where it was written by something else."""
    try:
        with path.open("rb") as file:
            found = parsing.json(file.read(_LONGEST))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _end(record: dict[str, Any]) -> End | None:
    match record:
        case {
            "exit_code": int(code),
            "reason": str(reason),
            "rank": int() | None as rank,
            "finished": str(finished),
            "attempt": int(number),
        } if 0 <= code <= _LAST_CODE:
            with contextlib.suppress(ValueError, OverflowError):
                moment = datetime.fromisoformat(finished)
                moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
                return End(code, reason, rank, moment.astimezone(UTC), number)
    return None
