"""What each process leaves behind when it ends, and who ended first.

Two places: a folder of this node and this launch alone (``DEPLOYKIT_WORKERS``), and
``ends/`` of the run's folder, where the nodes share one. Files appear whole or not at all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from signals import name as signal_name

Environ = Mapping[str, str]
Record = dict[str, Any]

_SIGNAL_BASE = 128


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
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(record) + "\n")
    scratch.replace(path)


def register(workers: Path, rank: int) -> None:
    """Tell the node's launcher that this process, of rank `rank`, has begun."""
    (workers / f"rank-{rank}.json").unlink(missing_ok=True)
    write(workers / f"rank-{rank}.pid", {"pid": os.getpid()})


def record_rank(env: Environ, rank: int, beside: int, returncode: int, *, stopped: bool) -> None:
    """Leave the end of rank `rank`, one of `beside` on its node, where a place is known.

    `stopped` says that it had been told to end.
    """
    record = {
        "rank": rank,
        "local_world_size": beside,
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


def record_node(env: Environ, node: int, code: int, reason: str, rank: int | None) -> None:
    """The launcher's last act on a node, where the run has a folder."""
    folder = run_folder(env)
    if folder is not None:
        record = {"exit_code": code, "reason": reason, "rank": rank, "finished": now()}
        write(folder / f"node-{node}.json", {**record, "attempt": attempt(env)})


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
    return {int(path.stem[5:]): read["pid"] for path, read in _read(workers, "rank-*.pid")}


def failures(folder: Path | None, attempt: int) -> list[Record]:
    """Ends of ranks with a code other than 0, those that nobody had told to end first."""
    found = all_ranks(folder) if folder else []
    failed = [end for end in found if end["exit_code"] and end["attempt"] == attempt]
    return sorted(failed, key=lambda end: (end["stopped"], end["finished"]))


def all_ranks(folder: Path) -> list[Record]:
    """The ends that ranks have left in `folder`."""
    return [record for _, record in _read(folder, "rank-*.json")]


def all_well(workers: Path) -> bool:
    """Whether every rank of this node has ended, with code 0."""
    found = all_ranks(workers)
    well = [end for end in found if end["exit_code"] == 0]
    return bool(found) and len(well) == found[0]["local_world_size"]


def how(code: int) -> str:
    """``ended with exit code 7``, or the signal that did it."""
    if code > _SIGNAL_BASE:
        return f"was ended by {signal_name(code - _SIGNAL_BASE)} (exit code {code})"
    return f"ended with exit code {code}"


def sentence(end: Record) -> str:
    """``rank 3 ended with exit code 7``."""
    told = ", as it had been told to end" if end["stopped"] else ""
    return f"rank {end['rank']} {how(end['exit_code'])}{told}"


def _read(folder: Path, pattern: str) -> Iterator[tuple[Path, Record]]:
    for path in folder.glob(pattern):
        try:
            yield path, json.loads(path.read_text())
        except FileNotFoundError:  # it ended, or began again, just now
            continue
