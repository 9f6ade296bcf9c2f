"""Whether a running run makes no progress, as the launchers of its nodes have recorded."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from deploykit.job.decode import from_json, read_record
from deploykit.observe.inspect import places, stacks

_LARGEST = 1 << 16
_MOST_NODES, _MOST_PROCESSES, _LONGEST_ADDRESS = 10_000, 100_000, 300
_MOST_SECONDS = 10**9
_MINUTE, _MINUTES = 60, 60
_STEP = 5
"""From so many minutes on, the time is told in steps of so many."""


def reason(folder: Path) -> str:
    """``no progress for 4 min: rank 3 is in ...``; empty while a node makes progress."""
    records = [_record(path) for path in sorted(folder.glob("exit_records/stall-*.json"))]
    last = max((record["attempt"] for record in records if record), default=0)
    stalled = [record for record in records if record and record["attempt"] == last]
    if not stalled or len(stalled) < stalled[0]["nodes"]:
        return ""
    since = max(_since(record) for record in stalled)
    text = f"no progress for {_span((datetime.now(UTC) - since).total_seconds())}"
    if all(record["waiting"] for record in stalled):
        return f"{text}: {_waiting(stalled)}"
    dumps = {record["dump"] for record in stalled if record["dump"]}
    ranks = [one for name in sorted(dumps) for one in _ranks(folder, name)]
    return f"{text}: {places.sentence(places.groups(ranks))}" if ranks else text


def _waiting(stalled: Sequence[dict[str, Any]]) -> str:
    """``4 of 4 processes wait to connect to HOST:PORT, where nobody listens``."""
    count = sum(record["waiting"] for record in stalled)
    who = f"{count} of {count} processes wait"
    address = next((record["address"] for record in stalled if record["address"]), "")
    if not address:
        return f"{who} in init_process_group"
    if all(record["refused"] for record in stalled if record["address"]):
        return f"{who} to connect to {address}, where nobody listens"
    return f"{who} for others at {address}"


def _ranks(folder: Path, name: str) -> tuple[stacks.RankStacks, ...]:
    safe = Path(name).name == name
    return stacks.read(folder / stacks.FOLDER / name).ranks if safe else ()


def _record(path: Path) -> dict[str, Any]:
    """A valid record; empty for any other file."""
    try:
        data = from_json(read_record(path, _LARGEST))
    except (OSError, ValueError):
        return {}
    match data:
        case {
            "time": str(time),
            "seconds": int(seconds),
            "dump": str(),
            "nodes": int(nodes),
            "attempt": int(),
        } if 0 <= seconds < _MOST_SECONDS and 0 < nodes <= _MOST_NODES and _moment(time):
            return {**data, **_meeting(data)}
    return {}


def _meeting(data: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of processes that wait in `init_process_group`."""
    match data:
        case {"waiting": int(count), "address": str(address), "refused": bool(refused)} if (
            0 <= count <= _MOST_PROCESSES and len(address) <= _LONGEST_ADDRESS
        ):
            return {"waiting": count, "address": address, "refused": refused}
    return {"waiting": 0, "address": "", "refused": False}


def _since(record: dict[str, Any]) -> datetime:
    """When the last sign of progress was seen."""
    noted = _moment(record["time"]) or datetime.now(UTC)
    return noted - timedelta(seconds=record["seconds"])


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _span(seconds: float) -> str:
    """A time in steps, so that the reason of a run seldom changes."""
    minutes = int(seconds // _MINUTE)
    if minutes < 1:
        return "less than 1 min"
    if minutes >= _MINUTES:
        return f"{minutes // _MINUTES} h"
    return f"{minutes if minutes < _STEP else minutes // _STEP * _STEP} min"
