"""The exit records that each node's launcher writes into a run (``exit_records/node-<N>.json``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploykit.job.decode import from_json, whole
from deploykit.lib import paths

STOPPED = 75
"""Exit code of a trainer that stopped on request after saving a checkpoint, and can resume."""

_LONGEST = 1 << 20
"""Bytes of a record that are read; a record is one line."""
_LAST_CODE = 255
_MOST = 10**18
"""Of a count or a size: more is no valid record."""


@dataclass(frozen=True)
class ExitRecord:
    """How one node ended. `rank` is the first rank that failed there; None where none did."""

    exit_code: int
    reason: str
    rank: int | None
    finished: datetime
    attempt: int


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank's program, which may have ended, and how to start another beside it."""

    rank: int
    host: str
    python: str
    libraries: str
    """``LD_LIBRARY_PATH`` there; may be empty."""


@dataclass(frozen=True)
class Files:
    """Files of a folder: how many, their bytes, and path and bytes of the largest ones."""

    folder: str
    count: int
    bytes: int
    largest: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Written:
    """What the program of a run wrote into its working folder, into output and checkpoints."""

    working_folder: Files
    output: Files
    checkpoints: Files
    """Empty in a record of an earlier version."""
    collects: bool
    """Whether the job file has `outputs`."""


def read(folder: Path) -> list[ExitRecord]:
    """The records of all nodes that have ended, failures first, then by time."""
    parsed = [_exit_record(_data(path)) for path in folder.glob("exit_records/node-*.json")]
    valid = [record for record in parsed if record is not None]
    return sorted(valid, key=lambda record: (record.exit_code == 0, record.finished))


def processes(folder: Path) -> list[RankProcess]:
    """The processes of this attempt, by rank, of nodes that have not recorded their end."""
    ended = _ended(folder)
    listed = (one for number, one in _started(folder) if (str(one.rank), number) not in ended)
    return sorted(listed, key=lambda one: one.rank)


def hosts(folder: Path) -> dict[int, str]:
    """The host on which each rank of the last attempt runs or ran."""
    return {one.rank: one.host for _, one in _started(folder)}


def _started(folder: Path) -> Iterator[tuple[object, RankProcess]]:
    """The processes of this attempt, each with the attempt that its record tells."""
    now = attempt(folder)
    for path in folder.glob("exit_records/process-*.json"):
        rank, record = whole(path.stem.rpartition("-")[2]), _data(path)
        number = record.get("attempt")
        match record:
            case {"host": str(host), "python": str(python), "libraries": str(libraries)} if (
                rank is not None and now in (None, number)
            ):
                yield number, RankProcess(rank, host, python, libraries)


def _ended(folder: Path) -> set[tuple[str, object]]:
    """Rank and attempt of the ranks whose nodes have recorded their end."""
    ended: set[tuple[str, object]] = set()
    for path in folder.glob("exit_records/node-*.json"):
        match _data(path):
            case {"attempt": int(number), "ranks": {**ranks}}:
                ended.update((str(rank), number) for rank in ranks)
    return ended


def restarts(folder: Path, *, upto: int | None = None) -> list[str]:
    """The known reasons of the job's restarts, in order; with `upto`, of the restarts up to it."""
    reasons: dict[int, str] = {}
    for path in folder.glob("exit_records/restart-*.json"):
        number, why = whole(path.stem.rpartition("-")[2]), _data(path).get("why")
        if number is not None and isinstance(why, str):
            reasons[number] = why
    return [reasons[number] for number in sorted(reasons) if upto is None or number <= upto]


def restart_times(folder: Path) -> list[tuple[int, str, datetime]]:
    """Number, reason and time of each restart of the job, in order."""
    times = []
    for path in folder.glob("exit_records/restart-*.json"):
        match _data(path):
            case {"restart": int(number), "why": str(why), "time": str(time)}:
                with contextlib.suppress(ValueError, OverflowError):
                    times.append((number, why, _aware(datetime.fromisoformat(time))))
    return sorted(times)


def failed_checks(folder: Path, attempt: int) -> list[tuple[str, str]]:
    """The nodes that failed the check before the start of an attempt, by host name, and why."""
    match _data(folder / "exit_records" / f"unhealthy-{attempt}.json"):
        case {"failed_check": True, "hosts": dict(hosts)}:
            return [(host, str(why)) for host, why in hosts.items()]
    return []


def attempt(folder: Path | str) -> int | None:
    """The number of the latest attempt, from 0; None before the first."""
    # no path object: there may be thousands of runs
    number = _data(f"{folder}/exit_records/attempt.json").get("attempt")
    return number if isinstance(number, int) else None


def written(folder: Path) -> Written | None:
    """What the program wrote, as the first node has recorded it at its end; None without that."""
    record = _data(folder / "exit_records" / "written.json")
    working, output = _files(record.get("working_folder")), _files(record.get("output"))
    if working is None or output is None:
        return None
    checkpoints = _files(record.get("checkpoints")) or Files("", 0, 0, ())
    return Written(working, output, checkpoints, bool(record.get("outputs")))


def _files(listed: object) -> Files | None:
    match listed:
        case {
            "folder": str(folder),
            "count": int(count),
            "bytes": int(size),
            "largest": [*largest],
        } if 0 <= count <= _MOST and 0 <= size <= _MOST:
            named = [(path, size) for path, size in map(_pair, largest) if 0 <= size <= _MOST]
            return Files(folder, count, size, tuple(named))
    return None


def _pair(item: object) -> tuple[str, int]:
    match item:
        case [str(path), int(size)]:
            return path, size
    return "", -1


def _data(path: Path | str) -> dict[str, Any]:
    """The content of a record; empty where it is not a JSON object."""
    try:
        data = from_json(paths.read_regular(path, _LONGEST))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _exit_record(record: dict[str, Any]) -> ExitRecord | None:
    match record:
        case {
            "exit_code": int(code),
            "reason": str(reason),
            "rank": int() | None as rank,
            "finished": str(finished),
            "attempt": int(number),
        } if 0 <= code <= _LAST_CODE:
            with contextlib.suppress(ValueError, OverflowError):
                moment = _aware(datetime.fromisoformat(finished))
                return ExitRecord(code, reason, rank, moment, number)
    return None


def _aware(moment: datetime) -> datetime:
    """A time in UTC, which one without a zone already is."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
