"""What each process leaves behind when it ends, and who ended first.

Two places: a folder of this node and this launch alone (``DEPLOYKIT_WORKERS``), and
``ends/`` of the run's folder, where the nodes share one. Files appear whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import private
from cluster import Rank
from signals import name as signal_name

Environ = Mapping[str, str]
Record = dict[str, Any]

STOPPED = 75
"""Exit code of a program that was told to stop, has saved a checkpoint, and can go on from it.

EX_TEMPFAIL of sysexits.h (https://man.freebsd.org/cgi/man.cgi?query=sysexits): "try again".
"""

_SIGNAL_BASE = 128
_LONGEST = 1 << 20
"""Bytes of a record that are read; it has one line."""
_OF_NODE = {"attempt": int}
_OF_RANK = {
    **dict.fromkeys(("rank", "local_world_size", "world_size", "exit_code", "attempt"), int),
    "stopped": bool,
    "finished": str,
}
"""What other parts read of a record, and of which type it must be."""


class Node(NamedTuple):
    """How a node ended: exit code, a sentence, and the rank that failed first, where one did."""

    code: int
    reason: str
    rank: int | None = None
    stopped: bool = False
    """Whether that rank had been told to end."""


def now() -> str:
    """UTC with milliseconds, ``2026-11-21T01:46:08.123Z``."""
    seconds = time.time()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def shell_code(returncode: int) -> int:
    """128 + the signal for a process that a signal ended, as a shell says it."""
    return returncode if returncode >= 0 else _SIGNAL_BASE - returncode


def attempt(env: Environ) -> int:
    """How often the whole job has been started again."""
    return int(env.get("SLURM_RESTART_COUNT") or 0)


def restarts(env: Environ) -> int:
    """How often this rank has been started again, by the scheduler or by torchrun."""
    return attempt(env) + int(env.get("TORCHELASTIC_RESTART_COUNT") or 0)


def run_folder(env: Environ) -> Path | None:
    """``ends/`` of the run's folder, or None where there is no run folder (SageMaker)."""
    run = env.get("DEPLOYKIT_RUN_DIR")
    return Path(run, "ends") if run else None


def write(path: Path, record: Record) -> None:
    """Write `record` so that a reader sees all of it or nothing."""
    private.folder(path.parent)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    private.write(scratch, json.dumps(record) + "\n")
    scratch.replace(path)


def register(env: Environ, workers: Path, rank: int) -> None:
    """Tell the node's launcher that this process, of rank `rank`, has begun, and not ended."""
    for folder in (workers, run_folder(env)):
        if folder is not None:
            (folder / f"rank-{rank}.json").unlink(missing_ok=True)
    write(workers / f"rank-{rank}.pid", {"pid": os.getpid()})


def record_rank(env: Environ, me: Rank, returncode: int, *, stopped: bool) -> None:
    """Leave the end of a rank where a place is known. `stopped`: it had been told to end."""
    rank = me.rank
    record = {
        "rank": rank,
        "local_world_size": me.local_world_size,
        "world_size": me.world_size,
        "exit_code": shell_code(returncode),
        "stopped": stopped,
        "finished": now(),
        "attempt": attempt(env),
    }
    workers = env.get("DEPLOYKIT_WORKERS")
    for folder in (Path(workers) if workers else None, run_folder(env)):
        if folder is not None:
            write(folder / f"rank-{rank}.json", record)
    if workers:
        Path(workers, f"rank-{rank}.pid").unlink(missing_ok=True)


def record_node(env: Environ, node: int, end: Node) -> None:
    """The launcher's word on how its node ended, where the run has a folder."""
    folder = run_folder(env)
    if folder is not None:
        record = {"exit_code": end.code, "reason": end.reason, "rank": end.rank}
        more = {"finished": now(), "attempt": attempt(env)}
        write(folder / f"node-{node}.json", {**record, **more})


def clear(env: Environ, node: int) -> None:
    """Forget the ends of an earlier attempt, before anything of this one can have ended."""
    folder = run_folder(env)
    if folder is None or not folder.is_dir():
        return
    (folder / f"node-{node}.json").unlink(missing_ok=True)
    if node == 0:
        for path in folder.glob("rank-*.json"):
            path.unlink(missing_ok=True)


def living(workers: Path) -> dict[int, int]:
    """Process id of each rank of this node that has begun and left no end."""
    found = _read(workers, "rank-*.pid", {"pid": int})
    return {rank: record["pid"] for rank, record in found if record["pid"] > 1}


def failures(folder: Path | None, attempt: int) -> list[Record]:
    """Ends of ranks that went wrong, those that nobody had told to end first."""
    found = all_ranks(folder) if folder else []
    failed = [end for end in found if went_wrong(end) and end["attempt"] == attempt]
    return sorted(failed, key=lambda end: (end["stopped"], end["finished"]))


def went_wrong(end: Record) -> bool:
    """Whether a rank neither finished nor stopped in good order."""
    return end["exit_code"] not in (0, STOPPED)


def all_ranks(folder: Path) -> list[Record]:
    """The ends that ranks have left in `folder`."""
    return [record for _, record in _read(folder, "rank-*.json", _OF_RANK)]


def all_well(workers: Path) -> bool:
    """Whether every rank of this node has ended, having finished or stopped in good order."""
    found = all_ranks(workers)
    well = [end for end in found if not went_wrong(end)]
    return bool(found) and len(well) == found[0]["local_world_size"]


def all_everywhere(env: Environ) -> bool:
    """Whether every rank of the job has ended well, on all nodes, as far as it can be seen."""
    folder = run_folder(env)
    found = [end for end in all_ranks(folder) if end["attempt"] == attempt(env)] if folder else []
    return bool(found) and len(found) == found[0]["world_size"] and not any(map(went_wrong, found))


def first_stopped(workers: Path) -> int | None:
    """The first rank of this node that stopped with a checkpoint."""
    stopped = (end["rank"] for end in all_ranks(workers) if end["exit_code"] == STOPPED)
    return min(stopped, default=None)


def nodes(env: Environ) -> dict[int, Record]:
    """The ends that nodes have left in this attempt."""
    folder, this = run_folder(env), attempt(env)
    found = _read(folder, "node-*.json", _OF_NODE) if folder else ()
    return {node: end for node, end in found if end["attempt"] == this}


def how(code: int) -> str:
    """``ended with exit code 7``, or the signal that did it."""
    if code > _SIGNAL_BASE:
        return f"was ended by {signal_name(code - _SIGNAL_BASE)} (exit code {code})"
    return f"ended with exit code {code}"


def sentence(end: Record) -> str:
    """``rank 3 ended with exit code 7``."""
    told = ", as it had been told to end" if end["stopped"] else ""
    return f"rank {end['rank']} {how(end['exit_code'])}{told}"


def read(path: Path) -> Record | None:
    """What was written there, or None where nothing is that can be read."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_LONGEST))
    except (OSError, ValueError, RecursionError):  # it ended, or began again, just now
        return None
    return record if isinstance(record, dict) else None


def _read(folder: Path, pattern: str, fields: Mapping[str, type]) -> Iterator[tuple[int, Record]]:
    """The records that have such fields, each with the number in its name."""
    for path in folder.glob(pattern):
        number, record = re.fullmatch(r"\w+-([0-9]{1,9})", path.stem), read(path)
        if number and record and all(isinstance(record.get(k), v) for k, v in fields.items()):
            yield int(number[1]), record
