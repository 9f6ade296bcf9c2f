"""The records that each node's launcher writes into ``exit_records/`` of a run folder.

`entrypoints/deploykit_node/records.py` describes every kind of record. `FIELDS` are the fields that
the control plane reads, and tests/node/test_node_records.py holds both to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploykit.job.decode import from_json, whole
from deploykit.lib import paths, units

STOPPED = 75
"""Exit code of a trainer that stopped on request after saving a checkpoint, and can resume."""
FIELDS: dict[str, dict[str, Any]] = {
    "attempt": {"attempt": int},
    "decision": {
        **dict.fromkeys(("attempt", "round"), int),
        **dict.fromkeys(("kind", "cause", "error", "why", "host"), str),
        "restart": bool,
        "at": float,
    },
    "checkpoints": {"location": str, "newest": str, "error": str},
    "node": {
        "exit_code": int,
        "reason": str,
        "rank": int | None,
        "finished": str,
        "attempt": int,
    },
    "packages": {"packages": dict},
    "process": {"host": str, "python": str, "libraries": str, "attempt": int},
    "restart": {"restart": int, "why": str, "time": str},
    "software": {"versions": dict, "gpus": list, "driver": str},
    "staging": {
        "attempt": int,
        "channel": str,
        "copied": int,
        "size": int,
        "done": bool,
    },
    "stall": {
        "time": str,
        "seconds": int,
        "dump": str,
        "nodes": int,
        "attempt": int,
        "waiting": int,
        "address": str,
        "refused": bool,
        "stopped": bool,
    },
    "unhealthy": {"failed_check": bool, "hosts": dict},
    "usage": {"attempt": int, "ranks": dict},
    "written": {"working_folder": dict, "output": dict, "checkpoints": dict, "outputs": list},
}
"""By kind of record; a record in which one is missing or of another type is ignored."""
_MAX_BYTES = 1 << 20
"""Of a record, which is one line."""
_MAX_CODE = 255
_LATEST = 253402300800.0
"""Seconds since 1970 of the year 10000, which no `datetime` can express."""


@dataclass(frozen=True)
class ExitRecord:
    """How one node ended. `rank` is the first failed rank there, if any."""

    exit_code: int
    reason: str
    rank: int | None
    finished: datetime
    attempt: int


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank's program, which may have ended, and how to start another one there."""

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
    largest: Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Written:
    """What the program of a run wrote into its working folder, into output and checkpoints."""

    working_folder: Files
    output: Files
    checkpoints: Files
    collects: bool
    """Whether the job file has `outputs`."""


def numbered(folder: Path, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The valid records ``KIND-N.json`` of a run, each with its number, by number."""
    names = folder.glob(f"exit_records/{kind}-*.json")
    files = ((whole(path.stem.rpartition("-")[2]), path) for path in names)
    for number, path in sorted((number, path) for number, path in files if number is not None):
        if record := valid(path, kind):
            yield number, record


def valid(path: Path | str, kind: str) -> dict[str, Any]:
    """The record in a file; empty if a field of its kind is missing or of another type."""
    try:
        record = from_json(paths.read_regular(path, _MAX_BYTES))
    except (OSError, ValueError):
        return {}
    is_valid = isinstance(record, dict) and all(
        name in record and isinstance(record[name], type_) for name, type_ in FIELDS[kind].items()
    )
    return record if is_valid else {}


def moment(text: object) -> datetime | None:
    """A time of a record, which is in UTC unless it says otherwise; None for any other text."""
    try:
        time = datetime.fromisoformat(str(text))
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def read(folder: Path) -> list[ExitRecord]:
    """The records of all nodes that have ended, failures first, then by time."""
    ended = [
        ExitRecord(record["exit_code"], record["reason"], record["rank"], time, record["attempt"])
        for _, record in numbered(folder, "node")
        if (time := moment(record["finished"])) and 0 <= record["exit_code"] <= _MAX_CODE
    ]
    return sorted(ended, key=lambda record: (record.exit_code == 0, record.finished))


@dataclass(frozen=True)
class Copied:
    """What the nodes have copied to a bucket, and why a copy failed; empty where none did."""

    location: str
    newest: str
    error: str


def copied(folder: Path) -> Copied | None:
    """The checkpoints in a bucket; None where the run has none there."""
    nodes = [record for _, record in numbered(folder, "checkpoints")]
    if not nodes:
        return None
    error = next((record["error"] for record in nodes if record["error"]), "")
    return Copied(nodes[0]["location"], nodes[0]["newest"], error)


def processes(folder: Path) -> list[RankProcess]:
    """The processes of this attempt, by rank, of nodes that have not recorded their end."""
    ended = {
        (str(rank), record["attempt"])
        for _, record in numbered(folder, "node")
        for rank in record.get("ranks", ())
    }
    return [
        process
        for attempt, process in _started(folder)
        if (str(process.rank), attempt) not in ended
    ]


def hosts(folder: Path) -> dict[int, str]:
    """The host on which each rank of the last attempt runs or ran."""
    return {process.rank: process.host for _, process in _started(folder)}


def _started(folder: Path) -> Iterator[tuple[int, RankProcess]]:
    """The processes of this attempt, by rank, each with its attempt."""
    now = attempt(folder)
    for rank, record in numbered(folder, "process"):
        if now in {None, record["attempt"]}:
            process = RankProcess(rank, record["host"], record["python"], record["libraries"])
            yield record["attempt"], process


def restarts(folder: Path, *, upto: int | None = None) -> list[str]:
    """The known reasons of the job's restarts, in order; with `upto`, of the restarts up to it."""
    records = numbered(folder, "restart")
    return [record["why"] for number, record in records if upto is None or number <= upto]


@dataclass(frozen=True)
class Decision:
    """Whether the ranks started again after a failure, and why."""

    attempt: int
    restart: bool
    kind: str
    """``transient``, ``deterministic`` or ``unknown``."""
    cause: str
    error: str
    """The exception, or what else a rank printed last; empty for a preemption and the like."""
    why: str
    time: datetime


def decisions(folder: Path) -> list[Decision]:
    """The decisions about restarts, in order."""
    records = (valid(path, "decision") for path in folder.glob("exit_records/decision-*.json"))
    fields = ("attempt", "restart", "kind", "cause", "error", "why")
    every = (
        Decision(
            **{name: record[name] for name in fields},
            time=datetime.fromtimestamp(record["at"], UTC),
        )
        for record in records
        if record and 0 <= record["at"] < _LATEST
    )
    return sorted(every, key=lambda one: one.time)


def restarting(folder: Path) -> str:
    """Why the ranks were last started again, while they run; empty if they were not."""
    made = decisions(folder)
    if not made or not made[-1].restart:
        return ""
    return f"restart {len(made)} {made[-1].why.removeprefix('restarting ')}"


def restart_times(folder: Path) -> list[tuple[int, str, datetime]]:
    """Number, reason and time of each restart of the job, in order."""
    return [
        (number, record["why"], time)
        for number, record in numbered(folder, "restart")
        if (time := moment(record["time"]))
    ]


def failed_checks(folder: Path, attempt: int) -> list[tuple[str, str]]:
    """The nodes that failed the check before the start of an attempt, by host name, and why."""
    record = valid(folder / "exit_records" / f"unhealthy-{attempt}.json", "unhealthy")
    if not record.get("failed_check"):
        return []
    return [(host, str(why)) for host, why in record["hosts"].items()]


def attempt(folder: Path | str) -> int | None:
    """The number of the latest attempt, from 0; None before the first."""
    # not a Path: there may be thousands of runs
    return valid(f"{folder}/exit_records/attempt.json", "attempt").get("attempt")


def staging(folder: Path) -> str:
    """``staging train: 3.2 of 40 GB on 2 nodes``; empty unless nodes are copying their data."""
    now = attempt(folder) or 0  # only Slurm counts attempts
    records = [record for _, record in numbered(folder, "staging") if record["attempt"] == now]
    copying = [record for record in records if record["channel"] and not record["done"]]
    if not copying:
        return ""
    name = min(copying, key=lambda record: record["copied"] - record["size"])["channel"]
    same = [record for record in copying if record["channel"] == name]
    copied, size = (sum(record[key] for record in same) for key in ("copied", "size"))
    nodes = f" on {len(same)} nodes" if len(same) > 1 else ""
    return f"staging {name}: {units.size(copied)} of {units.size(size)}{nodes}"


def written(folder: Path) -> Written | None:
    """What the program wrote, as recorded by the first node at its end; None before that."""
    record = valid(folder / "exit_records" / "written.json", "written")
    if not record:
        return None
    names = ("working_folder", "output", "checkpoints")
    working, output, checkpoints = (Files(**record[name]) for name in names)
    return Written(working, output, checkpoints, bool(record["outputs"]))
