"""The JSON files that launchers leave in the run folder: their schema, and how to read and write.

All are in ``exit_records/`` of the run folder, one object in one line each. The control plane reads
them in `deploykit/observe/exit_records.py`; docs/reference/node.md describes them for users.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from deploykit_node import private
from deploykit_node.cluster import Environ

FOLDER = "exit_records"
"""Folder inside the run folder."""

_LONGEST = 1 << 20
"""Bytes of a file that are read. A record is one line."""


class NodeRecord(TypedDict):
    """``node-N.json``: how the launcher of node N ended."""

    exit_code: int
    reason: str
    rank: int | None
    finished: str
    attempt: int
    ranks: dict[str, int]


class RankRecord(TypedDict):
    """``failed-A.R.json``: the first rank that failed in round R of attempt A.

    ``rank-N.json``, below a launcher that is not ours: how the program of rank N ended.
    """

    rank: int
    local_world_size: int
    world_size: int
    exit_code: int
    stopped: bool
    finished: str
    attempt: int


class RestartRecord(TypedDict):
    """``restart-N.json``: why Slurm started the job for the (N+1)th time."""

    restart: int
    why: str
    time: str


class AttemptRecord(TypedDict):
    """``attempt.json``: the current attempt, and the size of each log when it began, in bytes."""

    attempt: int
    logs: dict[str, int]


class BilledRecord(TypedDict):
    """``billed-N.json``: when attempt N began to be billed; its time of change is its end so far.

    Only a job that is stopped at its cost cap has it.
    """

    attempt: int
    began: float


class HeartbeatRecord(TypedDict):
    """``heartbeat-N.json``: where node N accepts connections while its launcher lives."""

    host: str
    port: int
    attempt: int


class ProcessRecord(TypedDict):
    """``process-N.json``: the process of rank N's program, for `deploykit dump`; kept after it."""

    pid: int
    started: int
    host: str
    python: str
    libraries: str
    stacks: str
    world_size: int
    attempt: int


class StallRecord(TypedDict):
    """``stall-N.json``: the ranks of node N make no progress; deleted when they do."""

    time: str
    seconds: int
    longest: int
    dump: str
    nodes: int
    attempt: int
    waiting: int
    """Processes that wait in `init_process_group`; 0 where any is elsewhere."""
    address: str
    refused: bool


class UnhealthyRecord(TypedDict):
    """``unhealthy-N.json``: nodes that failed in attempt N, and why, by host name."""

    attempt: int
    failed_check: bool
    hosts: dict[str, str]


class RankUsage(TypedDict):
    """Of a rank: percent of a core, bytes in RAM, percent and bytes of its GPU; None: not known."""

    cpu: float | None
    rss: int | None
    gpu: int | None
    gpu_memory: int | None
    gpu_size: int | None


class UsageRecord(TypedDict):
    """``usage-N.json``: what the ranks of node N use, by rank; kept after their end.

    ``history-N.jsonl`` has one in each line, with the greatest values since the line before.
    """

    time: str
    attempt: int
    ranks: dict[str, RankUsage]


class SoftwareRecord(TypedDict):
    """``software.json``: versions on node 0, names of the GPUs that its ranks see, the driver's."""

    versions: dict[str, str]
    gpus: list[str]
    driver: str


class FilesRecord(TypedDict):
    """The files of a folder: number and total size, and path and size of the largest."""

    folder: str
    count: int
    bytes: int
    largest: list[tuple[str, int]]


class WrittenRecord(TypedDict):
    """``written.json``: what the program wrote into its working, output and checkpoint folder."""

    attempt: int
    working_folder: FilesRecord
    output: FilesRecord
    checkpoints: FilesRecord
    outputs: list[str]


SCHEMA: dict[str, type] = {
    "node-N.json": NodeRecord,
    "failed-A.R.json": RankRecord,
    "rank-N.json": RankRecord,
    "restart-N.json": RestartRecord,
    "attempt.json": AttemptRecord,
    "billed-N.json": BilledRecord,
    "heartbeat-N.json": HeartbeatRecord,
    "process-N.json": ProcessRecord,
    "stall-N.json": StallRecord,
    "unhealthy-N.json": UnhealthyRecord,
    "usage-N.json": UsageRecord,
    "software.json": SoftwareRecord,
    "written.json": WrittenRecord,
}
"""Every kind of record, by the name of its file."""


def folder(env: Environ) -> Path | None:
    """``exit_records/`` of the run folder; None if the run has no folder, as on SageMaker."""
    run = env.get("DEPLOYKIT_RUN_DIR")
    return Path(run, FOLDER) if run else None


def write(path: Path, record: Mapping[str, object]) -> None:
    """Write `record` atomically: a reader sees all of it or nothing."""
    _write_scratch(path, record).replace(path)


def write_first(path: Path, record: Mapping[str, object]) -> bool:
    """As `write`, but only if there is no such file. False if there is one."""
    scratch = _write_scratch(path, record)
    try:
        path.hardlink_to(scratch)
    except FileExistsError:
        return False
    finally:
        scratch.unlink()
    return True


def _write_scratch(path: Path, record: Mapping[str, object]) -> Path:
    """A file beside `path`, of this process on this machine, with the record."""
    scratch = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    text = json.dumps(record) + "\n"
    try:
        private.write(scratch, text)
    except FileNotFoundError:
        private.folder(path.parent)
        private.write(scratch, text)
    return scratch


def read(path: Path) -> dict[str, Any] | None:
    """The JSON object in the file; None if the file is missing or holds something else."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_LONGEST))
    except (OSError, ValueError, RecursionError):  # removed or replaced at this moment
        return None
    return record if isinstance(record, dict) else None


def read_all(
    folder: Path, pattern: str, fields: Mapping[str, type]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number in the name and the content of each file whose `fields` have these types."""
    for path in folder.glob(pattern):
        number, record = re.fullmatch(r"\w+-([0-9]{1,9})", path.stem), valid(path, fields)
        if number and record is not None:
            yield int(number[1]), record


def valid(path: Path, fields: Mapping[str, type]) -> dict[str, Any] | None:
    """The content of the file if its `fields` have these types, else None."""
    record = read(path)
    if record is None or not all(isinstance(record.get(k), v) for k, v in fields.items()):
        return None
    return record
