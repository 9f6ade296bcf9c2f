"""Exit records: how each rank and each node ended, and which rank failed first.

A rank leaves its record in a folder of this node and this launch alone (``DEPLOYKIT_RANK_DIR``).
``exit_records/`` of the run folder, which all nodes share, gets one record of each node, and that
of the first rank of all that failed: what ten thousand ranks write and read there is a load.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

from deploykit_node import records, signals
from deploykit_node.cluster import Cluster, Environ, Rank
from deploykit_node.gathering import Gathering
from deploykit_node.log import now
from deploykit_node.records import NodeRecord, RankRecord, UnhealthyRecord

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
_OF_AN_ATTEMPT = ("rank-", "failed-", "gathering-")
"""Beginnings of the names that node 0 deletes before another attempt.

``process-`` is none: the ranks of the next attempt write theirs over them.
"""


class NodeExit(NamedTuple):
    """How a node ended: the exit code, the reason, and the rank that failed first, if any."""

    code: int
    reason: str
    rank: int | None = None
    stopped: bool = False
    """Whether a signal to stop had arrived: at that rank, or before any rank had started."""
    ranks: Mapping[str, int] = MappingProxyType({})
    """Exit code of each rank of the node that has ended, by its number."""


def attempt(env: Environ) -> int:
    """How often the scheduler has restarted the whole job."""
    return int(env.get("SLURM_RESTART_COUNT") or 0)


def restarts(env: Environ) -> int:
    """How often this rank was restarted: by the scheduler, by other nodes, or by torchrun."""
    return attempt(env) + (generation(env) or 1) - 1 + _round(env)


def generation(env: Environ) -> int:
    """Which group of nodes trains, from 1, where their number may change; else 0."""
    return int(env.get("DEPLOYKIT_GENERATION") or 0)


def register(env: Environ, ranks: Path, rank: int) -> None:
    """Tell the node's launcher that this process is rank `rank`, and drop its earlier record."""
    (ranks / f"rank-{rank}.json").unlink(missing_ok=True)
    (ranks / f"round-{_round(env)}").touch()
    records.write(ranks / f"rank-{rank}.pid", {"pid": os.getpid()})


def _round(env: Environ) -> int:
    """How often torchrun has started this rank anew."""
    return int(env.get("TORCHELASTIC_RESTART_COUNT") or 0)


def last_round(ranks: Path) -> int:
    """How often torchrun has started the ranks of this node anew."""
    rounds = (path.name.partition("-")[2] for path in ranks.glob("round-*"))
    return max(map(int, rounds), default=0)


def record_rank(env: Environ, rank: Rank, returncode: int, *, stopped: bool) -> None:
    """Write a rank's record: on the node, for all nodes if it is the first to fail.

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
    here, shared = env.get("DEPLOYKIT_RANK_DIR"), records.folder(env)
    if here is None:
        if shared is not None:
            records.write(shared / f"rank-{rank.rank}.json", record)
        return
    ranks = Path(here)
    if shared is not None and went_wrong(record):
        _publish(ranks, shared, _failed(env, _round(env), stopped=stopped), record)
    records.write(ranks / f"rank-{rank.rank}.json", record)
    (ranks / f"rank-{rank.rank}.pid").unlink(missing_ok=True)


def _publish(ranks: Path, shared: Path, name: str, record: RankRecord) -> None:
    """Show the other nodes a rank that failed, unless one did before: on this node, or on any."""
    if records.write_first(ranks / name, record) and not (shared / name).exists():
        records.write_first(shared / name, record)


def _failed(env: Environ, number: int, *, stopped: bool) -> str:
    """Name of the record of the first rank that failed in a round, without or after a signal."""
    group = f"{generation(env)}." if generation(env) else ""
    return f"failed-{attempt(env)}.{group}{number}{'-stopped' if stopped else ''}.json"


def first_failure(env: Environ, ranks: Path) -> RankRecord | None:
    """The rank that failed first, of all nodes as far as it shows, one without a signal before."""
    last, shared = last_round(ranks), records.folder(env)
    for stopped in (False, True):
        name = _failed(env, last, stopped=stopped)
        recorded = records.valid(shared / name, _RANK_FIELDS) if shared else None
        own = [one for one in failures(ranks, attempt(env)) if one["stopped"] == stopped]
        if recorded and recorded["attempt"] == attempt(env):
            return cast(RankRecord, recorded)
        if own:
            return own[0]
    return None


def record_node(env: Environ, node: int, end: NodeExit) -> None:
    """Write a node's record if the run has a folder."""
    folder = records.folder(env)
    if folder is not None:
        record: NodeRecord = {
            "exit_code": end.code,
            "reason": end.reason,
            "rank": end.rank,
            "finished": now(),
            "attempt": attempt(env),
            "ranks": dict(end.ranks),
        }
        records.write(folder / f"node-{node}.json", record)


def gathering(env: Environ, name: str, here: Cluster, flag: Path | None = None) -> Gathering | None:
    """The nodes that have come to the point `name` of this attempt; None without a run folder."""
    folder, group = records.folder(env), generation(env)
    point = f"gathering-{name}{group or ''}-{attempt(env)}"
    return Gathering(folder / point, here.node, len(here.hosts), flag) if folder else None


def record_unhealthy(env: Environ, hosts: Mapping[str, str], *, failed_check: bool) -> None:
    """Record nodes that have failed, and why, if the run has a folder.

    `failed_check` is false for a node that disappeared, which may not have been its own fault.
    """
    folder = records.folder(env)
    if folder is not None and hosts:
        record: UnhealthyRecord = {
            "attempt": attempt(env),
            "failed_check": failed_check,
            "hosts": dict(hosts),
        }
        records.write(folder / f"unhealthy-{attempt(env)}.json", record)


def clear(env: Environ, node: int, *, ranks: bool = True) -> None:
    """Delete the records of an earlier attempt. Call it before any rank of this one can end.

    Without `ranks` those of the node alone.
    """
    folder = records.folder(env)
    if folder is None or not folder.is_dir():
        return
    (folder / f"node-{node}.json").unlink(missing_ok=True)
    (folder / f"stall-{node}.json").unlink(missing_ok=True)
    if node == 0 and ranks:
        own = re.compile(rf"failed-{attempt(env)}\.|gathering-\w+-{attempt(env)}$")
        with os.scandir(folder) as entries:
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
    registered = records.read_all(ranks, "rank-*.pid", {"pid": int})
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
    ranks = records.read_all(folder, "rank-*.json", _RANK_FIELDS)
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
    folder = records.folder(env)
    record = records.valid(folder / f"node-{node}.json", _NODE_FIELDS) if folder else None
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
