"""Every file that a node leaves in the run folder: its schema, and how to read and write it.

Most are JSON in ``exit_records/``, one object in one line each: docs/reference/node.md describes
them for users, and the control plane reads them with `deploykit/observe/exit_records.py`. A rank
leaves its own record in a folder of this node and this launch alone (``DEPLOYKIT_RANK_DIR``). The
run folder, which all nodes share, gets one record of each node and that of the first rank of all
that failed: what ten thousand ranks write and read there is a load.

They are readable for their owner alone. The user's umask decides about what the program writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, cast

from deploykit_node import signals
from deploykit_node.cluster import BadEnvironment, Environ, Rank
from deploykit_node.log import now

FOLDER = "exit_records"
"""Folder inside the run folder."""

STOPPED = 75
"""Exit code of a program that was told to stop, saved a checkpoint, and can resume from it.

EX_TEMPFAIL of sysexits.h (https://man.freebsd.org/cgi/man.cgi?query=sysexits): "try again".
"""

_NODE_FIELDS = {"attempt": int}
_RANK_FIELDS = {
    **dict.fromkeys(("rank", "local_world_size", "world_size", "exit_code", "attempt"), int),
    "stopped": bool,
    "finished": str,
}
"""Fields that this module relies on when it reads a record, and their types."""
_OF_AN_ATTEMPT = ("rank-", "failed-", "error-", "gathering-")
"""Beginnings of the names that node 0 deletes before another attempt.

``process-`` is none: the ranks of the next attempt write theirs over them.
"""
_ERROR_FIELDS = {
    **dict.fromkeys(("rank", "local_world_size", "attempt"), int),
    **dict.fromkeys(("stopped", "at_start", "steps"), bool),
    **dict.fromkeys(("label", "retry", "error", "root", "finished"), str),
    "step": (int, type(None)),
}
_DECISION_FIELDS = {
    **dict.fromkeys(("attempt", "round"), int),
    **dict.fromkeys(("kind", "cause", "root", "saved", "why"), str),
    **dict.fromkeys(("restart", "steps"), bool),
    "at": float,
    "step": (int, type(None)),
}
_LONGEST = 1 << 20
"""Bytes of a file that are read. A record is one line."""


class NodeExit(NamedTuple):
    """How a node ended: the exit code, the reason, and the rank that failed first, if any."""

    code: int
    reason: str
    rank: int | None = None
    stopped: bool = False
    """Whether a signal to stop had arrived: at that rank, or before any rank had started."""
    ranks: Mapping[str, int] = MappingProxyType({})
    """Exit code of each rank of the node that has ended, by its number."""
    root: ErrorRecord | None = None
    """Why the rank failed that brought the job down, as far as it is known."""


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


class ErrorRecord(TypedDict):
    """``error-A.R.json``: why the first rank failed in round R of attempt A, by its own output."""

    rank: int
    local_world_size: int
    attempt: int
    stopped: bool
    finished: str
    label: str
    retry: str
    at_start: bool
    error: str
    root: str
    step: int | None
    steps: bool


class DecisionRecord(TypedDict):
    """``decision-A.R.json``: whether the ranks start again after round R of attempt A, and why."""

    restart: bool
    kind: str
    why: str
    wait: float
    attempt: int
    round: int
    cause: str
    error: str
    root: str
    step: int | None
    steps: bool
    saved: str
    host: str
    at: float


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
    stopped: bool
    """Whether the ranks were then told to stop: by a time limit, a cost cap, or the user."""


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


class PackagesRecord(TypedDict):
    """``packages.json``: the version of each Python package on node 0, by its name."""

    packages: dict[str, str]


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


class StagingRecord(TypedDict):
    """``staging-N.json``: how far node N has copied the input channels with `stage`."""

    attempt: int
    channel: str
    copied: int
    size: int
    folders: dict[str, str]
    """By channel, where its copy is."""
    done: bool
    """Whether all nodes have all channels."""


class CheckpointsRecord(TypedDict):
    """``checkpoints-N.json``: what node N has copied to the bucket, and why a copy failed."""

    attempt: int
    time: str
    location: str
    newest: str
    error: str


SCHEMA: dict[str, type] = {
    "node-N.json": NodeRecord,
    "failed-A.R.json": RankRecord,
    "rank-N.json": RankRecord,
    "error-A.R.json": ErrorRecord,
    "decision-A.R.json": DecisionRecord,
    "restart-N.json": RestartRecord,
    "attempt.json": AttemptRecord,
    "billed-N.json": BilledRecord,
    "heartbeat-N.json": HeartbeatRecord,
    "process-N.json": ProcessRecord,
    "staging-N.json": StagingRecord,
    "stall-N.json": StallRecord,
    "unhealthy-N.json": UnhealthyRecord,
    "usage-N.json": UsageRecord,
    "software.json": SoftwareRecord,
    "packages.json": PackagesRecord,
    "written.json": WrittenRecord,
    "checkpoints-N.json": CheckpointsRecord,
}
"""Every kind of record, by the name of its file."""


def folder(env: Environ) -> Path | None:
    """``exit_records/`` of the run folder; None if the run has no folder, as on SageMaker."""
    run = env.get("DEPLOYKIT_RUN_DIR")
    return Path(run, FOLDER) if run else None


def beside(env: Environ, name: str) -> Path | None:
    """A folder in the run folder, or else in the output folder; None without either."""
    parent = env.get("DEPLOYKIT_RUN_DIR") or env.get("DEPLOYKIT_OUTPUT_DIR") or ""
    return Path(parent, name) if parent and "://" not in parent else None


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
        write_text(scratch, text)
    except FileNotFoundError:
        make_folder(path.parent)
        write_text(scratch, text)
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
    folder: Path, pattern: str, fields: Mapping[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number in the name and the content of each file whose `fields` have these types."""
    for path in folder.glob(pattern):
        number, record = re.fullmatch(r"\w+-([0-9]{1,9})", path.stem), valid(path, fields)
        if number and record is not None:
            yield int(number[1]), record


def valid(path: Path, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The content of the file if its `fields` have these types, else None."""
    record = read(path)
    if record is None or not all(isinstance(record.get(k), v) for k, v in fields.items()):
        return None
    return record


def private(path: str, flags: int) -> int:
    """For `open`: create the file with mode 0600."""
    return os.open(path, flags, 0o600)


def write_text(path: Path, text: str) -> None:
    """Write a file; a new one gets mode 0600."""
    with open(path, "w", encoding="utf-8", opener=private) as file:
        file.write(text)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, each with at most its parent's permissions.

    So a folder is private inside a run folder, and follows the umask in a folder of the user's.
    """
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=path.parent.stat().st_mode & 0o777 | 0o700, exist_ok=True)


def own_folder(base: Path, instead: str) -> Path:
    """Make and return ``deploykit-UID`` in `base`: what this user keeps on a node between jobs.

    Raises BadEnvironment, with what to do `instead`, if other users could change it.
    """
    path = base / f"deploykit-{os.getuid()}"
    base.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = path.lstat()
    if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode) or info.st_mode & 0o077:
        raise BadEnvironment(
            f"{path} belongs to another user, or other users can change it. Delete it, or {instead}"
        )
    return path


def attempt(env: Environ) -> int:
    """How often the scheduler has restarted the whole job."""
    return int(env.get("SLURM_RESTART_COUNT") or 0)


def restarts(env: Environ) -> int:
    """How often this rank was restarted: by the scheduler, by other nodes, or by torchrun."""
    return attempt(env) + (generation(env) or 1) - 1 + _round(env)


def generation(env: Environ) -> int:
    """Which group of nodes trains, from 1, where their number may change; else 0."""
    return int(env.get("DEPLOYKIT_GENERATION") or 0)


def register(env: Environ, ranks: Path, rank: int, pid: int) -> None:
    """Tell the node's launcher which process is rank `rank`, and drop the rank's earlier record."""
    for name in (f"rank-{rank}.json", f"error-{rank}.json"):
        (ranks / name).unlink(missing_ok=True)
    (ranks / f"round-{_round(env)}").touch()
    write(ranks / f"rank-{rank}.pid", {"pid": pid})


def _round(env: Environ) -> int:
    """How often torchrun has started this rank anew."""
    return int(env.get("TORCHELASTIC_RESTART_COUNT") or 0)


def last_round(ranks: Path) -> int:
    """How often torchrun has started the ranks of this node anew."""
    rounds = (path.name.partition("-")[2] for path in ranks.glob("round-*"))
    return max(map(int, rounds), default=0)


def record_rank(env: Environ, rank: Rank, returncode: int, *, stopped: bool) -> RankRecord:
    """Write and return a rank's record: on the node, for all nodes if it is the first to fail.

    `stopped` says whether the rank had received a signal to stop. Below a launcher that is not
    ours, the record is in the run folder if the run has one.
    """
    record: RankRecord = {
        "rank": rank.rank,
        "local_world_size": rank.local_world_size,
        "world_size": rank.world_size,
        "exit_code": signals.shell_code(returncode),
        "stopped": stopped,
        "finished": now(),
        "attempt": attempt(env),
    }
    here, shared = env.get("DEPLOYKIT_RANK_DIR"), folder(env)
    if here is None:
        if shared is not None:
            write(shared / f"rank-{rank.rank}.json", record)
        return record
    ranks = Path(here)
    if shared is not None and went_wrong(record):
        name = of_round(env, "failed", _round(env), "-stopped" if stopped else "")
        _publish(ranks, shared, name, record)
    write(ranks / f"rank-{rank.rank}.json", record)
    (ranks / f"rank-{rank.rank}.pid").unlink(missing_ok=True)
    return record


def _publish(ranks: Path, shared: Path, name: str, record: RankRecord) -> None:
    """Show the other nodes a rank that failed, unless one did before: on this node, or on any."""
    if write_first(ranks / name, record) and not (shared / name).exists():
        write_first(shared / name, record)


def of_round(env: Environ, kind: str, number: int, ending: str = "") -> str:
    """Name of a record of a round: ``failed-A.R-stopped.json``, of the first such failed rank."""
    group = f"{generation(env)}." if generation(env) else ""
    return f"{kind}-{attempt(env)}.{group}{number}{ending}.json"


def record_error(env: Environ, ranks: Path, error: ErrorRecord, *, is_root: bool) -> None:
    """Write why a rank failed: on the node, and for all nodes if no other rank is the reason."""
    write(ranks / f"error-{error['rank']}.json", error)
    shared = folder(env)
    if shared is not None and is_root:
        write_first(shared / of_round(env, "error", _round(env)), error)


def errors(env: Environ, ranks: Path) -> list[ErrorRecord]:
    """Why ranks of this node failed in the last round, the first one first."""
    errors = (record for _, record in read_all(ranks, "error-*.json", _ERROR_FIELDS))
    own = [cast(ErrorRecord, one) for one in errors if one["attempt"] == attempt(env)]
    return sorted(own, key=lambda one: one["finished"])


def shared_error(env: Environ, number: int) -> ErrorRecord | None:
    """Why the first rank failed, of all nodes, in a round; None if only symptoms are known."""
    shared = folder(env)
    record = valid(shared / of_round(env, "error", number), _ERROR_FIELDS) if shared else None
    return cast(ErrorRecord, record) if record else None


def decisions(env: Environ) -> list[DecisionRecord]:
    """All decisions about restarts of this run so far, in order."""
    shared = folder(env)
    paths = shared.glob("decision-*.json") if shared else ()
    records = (record for path in paths if (record := valid(path, _DECISION_FIELDS)))
    return sorted((cast(DecisionRecord, one) for one in records), key=lambda one: one["at"])


def first_failure(env: Environ, ranks: Path) -> RankRecord | None:
    """The rank that failed first, of all nodes as far as it shows, one without a signal before."""
    last, shared = last_round(ranks), folder(env)
    for stopped in (False, True):
        name = of_round(env, "failed", last, "-stopped" if stopped else "")
        recorded = valid(shared / name, _RANK_FIELDS) if shared else None
        own = [one for one in failures(ranks, attempt(env)) if one["stopped"] == stopped]
        if recorded and recorded["attempt"] == attempt(env):
            return cast(RankRecord, recorded)
        if own:
            return own[0]
    return None


def record_node(env: Environ, node: int, end: NodeExit) -> None:
    """Write a node's record if the run has a folder."""
    shared = folder(env)
    if shared is not None:
        record: NodeRecord = {
            "exit_code": end.code,
            "reason": end.reason,
            "rank": end.rank,
            "finished": now(),
            "attempt": attempt(env),
            "ranks": dict(end.ranks),
        }
        write(shared / f"node-{node}.json", record)


def record_unhealthy(env: Environ, hosts: Mapping[str, str], *, failed_check: bool) -> None:
    """Record nodes that have failed, and why, if the run has a folder.

    `failed_check` is false for a node that disappeared, which may not have been its own fault.
    """
    shared = folder(env)
    if shared is not None and hosts:
        record: UnhealthyRecord = {
            "attempt": attempt(env),
            "failed_check": failed_check,
            "hosts": dict(hosts),
        }
        write(shared / f"unhealthy-{attempt(env)}.json", record)


def clear(env: Environ, node: int, *, ranks: bool = True) -> None:
    """Delete the records of an earlier attempt. Call it before any rank of this one can end.

    Without `ranks` those of the node alone.
    """
    shared = folder(env)
    if shared is None or not shared.is_dir():
        return
    (shared / f"node-{node}.json").unlink(missing_ok=True)
    (shared / f"stall-{node}.json").unlink(missing_ok=True)
    if node == 0 and ranks:
        own = re.compile(rf"(failed|error)-{attempt(env)}\.|gathering-\w+-{attempt(env)}$")
        with os.scandir(shared) as entries:
            old = [one for one in entries if one.name.startswith(_OF_AN_ATTEMPT)]
        for entry in old:
            if own.match(entry.name):
                continue  # another node may have begun, and ended, before this one
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)


@contextlib.contextmanager
def writing(ranks: Path, name: str) -> Iterator[None]:
    """Meanwhile something is written beside the ranks, for which the node waits when it stops."""
    file = ranks / f"{name}.writing"
    file.touch()
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def is_written(ranks: Path) -> bool:
    """Whether something is being written beside the ranks of this node: `writing`."""
    return any(ranks.glob("*.writing"))


def living(ranks: Path) -> dict[int, int]:
    """Process id of each rank of this node that has registered and left no record."""
    registered = read_all(ranks, "rank-*.pid", {"pid": int})
    return {rank: record["pid"] for rank, record in registered if record["pid"] > 1}


def failures(folder: Path, attempt: int) -> list[RankRecord]:
    """Records of ranks that failed in this attempt, those without a stop signal first."""
    ranks = all_ranks(folder)
    failed = [record for record in ranks if went_wrong(record) and record["attempt"] == attempt]
    return sorted(failed, key=lambda record: (record["stopped"], record["finished"]))


def went_wrong(record: RankRecord) -> bool:
    """Whether a rank neither finished nor stopped with a checkpoint."""
    return record["exit_code"] not in (0, STOPPED)


def all_ranks(folder: Path) -> list[RankRecord]:
    """The records of ranks in `folder`, in no particular order."""
    ranks = read_all(folder, "rank-*.json", _RANK_FIELDS)
    return [cast(RankRecord, record) for _, record in ranks]


def all_ended(ranks: Path) -> bool:
    """Whether every rank of this node has ended in some way."""
    ended = all_ranks(ranks)
    return bool(ended) and len(ended) == ended[0]["local_world_size"]


def all_ended_well(ranks: Path) -> bool:
    """Whether every rank of this node has finished or stopped with a checkpoint."""
    ended = all_ranks(ranks)
    well = [record for record in ended if not went_wrong(record)]
    return bool(ended) and len(well) == ended[0]["local_world_size"]


def first_stopped(ranks: Path) -> int | None:
    """The lowest rank of this node that stopped with a checkpoint."""
    stopped = (record["rank"] for record in all_ranks(ranks) if record["exit_code"] == STOPPED)
    return min(stopped, default=None)


def codes(ranks: Path) -> dict[str, int]:
    """The exit code of each rank of this node that has ended, by its number."""
    ended = sorted(all_ranks(ranks), key=lambda record: record["rank"])
    return {str(record["rank"]): record["exit_code"] for record in ended}


def has_ended(env: Environ, node: int) -> bool:
    """Whether a node has left its record in this attempt."""
    shared = folder(env)
    record = valid(shared / f"node-{node}.json", _NODE_FIELDS) if shared else None
    return record is not None and record["attempt"] == attempt(env)


def how(code: int) -> str:
    """``exited with code 7``, or the signal behind the code."""
    if code > signals.BASE:
        return f"was terminated by {signals.name(code - signals.BASE)} (exit code {code})"
    return f"exited with code {code}"


def sentence(record: RankRecord) -> str:
    """``rank 3 exited with code 7``."""
    stopped = " after a signal to stop" if record["stopped"] else ""
    return f"rank {record['rank']} {how(record['exit_code'])}{stopped}"
