"""Exit records: how each rank and each node ended, and which rank failed first.

A rank leaves its record in two folders: one of this node and this launch alone
(``DEPLOYKIT_RANK_DIR``), and ``exit_records/`` of the run folder, which all nodes share.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, cast

from deploykit_node import records
from deploykit_node.cluster import Environ, Rank
from deploykit_node.log import now
from deploykit_node.records import NodeRecord, RankRecord
from deploykit_node.signals import name as signal_name

STOPPED = 75
"""Exit code of a program that was told to stop, saved a checkpoint, and can resume from it.

EX_TEMPFAIL of sysexits.h (https://man.freebsd.org/cgi/man.cgi?query=sysexits): "try again".
"""

_SIGNAL_BASE = 128
_NODE_FIELDS = {"attempt": int}
_RANK_FIELDS = {
    **dict.fromkeys(("rank", "local_world_size", "world_size", "exit_code", "attempt"), int),
    "stopped": bool,
    "finished": str,
}
"""Fields that this module relies on when it reads a record, and their types."""


class NodeExit(NamedTuple):
    """How a node ended: the exit code, the reason, and the rank that failed first, if any."""

    code: int
    reason: str
    rank: int | None = None
    stopped: bool = False
    """Whether a signal to stop had arrived: at that rank, or before any rank had started."""


def shell_code(returncode: int) -> int:
    """The exit code as a shell reports it: 128 + the signal for a process killed by a signal."""
    return returncode if returncode >= 0 else _SIGNAL_BASE - returncode


def attempt(env: Environ) -> int:
    """How often the scheduler has restarted the whole job."""
    return int(env.get("SLURM_RESTART_COUNT") or 0)


def restarts(env: Environ) -> int:
    """How often this rank was restarted: by the scheduler, by other nodes, or by torchrun."""
    changes = int(env.get("DEPLOYKIT_GENERATION") or 1) - 1
    return attempt(env) + changes + int(env.get("TORCHELASTIC_RESTART_COUNT") or 0)


def register(env: Environ, ranks: Path, rank: int) -> None:
    """Tell the node's launcher that this process is rank `rank`, and drop its earlier record."""
    for folder in (ranks, records.folder(env)):
        if folder is not None:
            (folder / f"rank-{rank}.json").unlink(missing_ok=True)
    records.write(ranks / f"rank-{rank}.pid", {"pid": os.getpid()})


def record_rank(env: Environ, rank: Rank, returncode: int, *, stopped: bool) -> None:
    """Write a rank's record to the folders that exist.

    `stopped` says whether the rank had received a signal to stop.
    """
    record: RankRecord = {
        "rank": rank.rank,
        "local_world_size": rank.local_world_size,
        "world_size": rank.world_size,
        "exit_code": shell_code(returncode),
        "stopped": stopped,
        "finished": now(),
        "attempt": attempt(env),
    }
    ranks = env.get("DEPLOYKIT_RANK_DIR")
    for folder in (Path(ranks) if ranks else None, records.folder(env)):
        if folder is not None:
            records.write(folder / f"rank-{rank.rank}.json", record)
    if ranks:
        Path(ranks, f"rank-{rank.rank}.pid").unlink(missing_ok=True)


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
        }
        records.write(folder / f"node-{node}.json", record)


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
        for path in (*folder.glob("rank-*.json"), *folder.glob("process-*.json")):
            path.unlink(missing_ok=True)


def living(ranks: Path) -> dict[int, int]:
    """Process id of each rank of this node that has registered and left no record."""
    registered = records.read_all(ranks, "rank-*.pid", {"pid": int})
    return {rank: record["pid"] for rank, record in registered if record["pid"] > 1}


def failures(folder: Path | None, attempt: int) -> list[RankRecord]:
    """Records of ranks that failed in this attempt, those without a stop signal first."""
    ranks = all_ranks(folder) if folder else []
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


def all_ended_well_everywhere(env: Environ) -> bool:
    """Whether every rank on all nodes has ended well, as far as the run folder shows."""
    folder, current = records.folder(env), attempt(env)
    ranks = all_ranks(folder) if folder else []
    ended = [record for record in ranks if record["attempt"] == current]
    return bool(ended) and len(ended) == ended[0]["world_size"] and not any(map(went_wrong, ended))


def first_stopped(ranks: Path) -> int | None:
    """The lowest rank of this node that stopped with a checkpoint."""
    stopped = (record["rank"] for record in all_ranks(ranks) if record["exit_code"] == STOPPED)
    return min(stopped, default=None)


def nodes(env: Environ) -> dict[int, NodeRecord]:
    """The records of the nodes that have ended in this attempt, by node."""
    folder, current = records.folder(env), attempt(env)
    ended = records.read_all(folder, "node-*.json", _NODE_FIELDS) if folder else ()
    return {
        node: cast(NodeRecord, record) for node, record in ended if record["attempt"] == current
    }


def how(code: int) -> str:
    """``exited with code 7``, or the signal behind the code."""
    if code > _SIGNAL_BASE:
        return f"was terminated by {signal_name(code - _SIGNAL_BASE)} (exit code {code})"
    return f"exited with code {code}"


def sentence(record: RankRecord) -> str:
    """``rank 3 exited with code 7``."""
    stopped = " after a signal to stop" if record["stopped"] else ""
    return f"rank {record['rank']} {how(record['exit_code'])}{stopped}"
