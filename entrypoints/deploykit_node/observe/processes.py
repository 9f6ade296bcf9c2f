"""The processes of the ranks on this node: recorded while they run, and found again."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from deploykit_node import cluster, records
from deploykit_node.cluster import Environ
from deploykit_node.records import ProcessRecord

_FIELDS = {
    **dict.fromkeys(("pid", "started", "world_size", "attempt"), int),
    **dict.fromkeys(("host", "python", "libraries", "stacks"), str),
}
_MOST_CHILDREN = 16
_USER, _STARTED = 11, 19
"""Positions in a line of /proc/PID/stat, counted from the state."""
_UNKNOWN = 0
_RANK = re.compile(rb"RANK=(\d{1,9})")


class Stat(NamedTuple):
    """What the kernel tells of a process, from ``/proc/PID/stat``.

    https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    """

    name: str
    state: str
    parent: int
    cpu: int
    """Clock ticks that it has computed, without its children."""
    started: int
    """Clock ticks after the machine's start."""


def register(env: Environ, rank: cluster.Rank, pid: int, *, stacks: Path) -> None:
    """Record the process of a rank's program, where the run has a folder.

    `stacks` is the file into which it writes its stacks when it gets SIGURG.
    """
    folder, state = records.folder(env), stat(pid)
    record: ProcessRecord = {
        "pid": pid,
        "started": state.started if state else _UNKNOWN,
        "host": cluster.host_name(env),
        "python": sys.executable,
        "libraries": env.get("LD_LIBRARY_PATH", ""),
        "stacks": str(stacks),
        "world_size": rank.world_size,
        "attempt": records.attempt(env),
    }
    if folder is not None:
        with contextlib.suppress(OSError):  # a full disk is no reason not to train
            records.write(folder / f"process-{rank.rank}.json", record)


def here(env: Environ) -> dict[int, ProcessRecord]:
    """The processes of this node's ranks that are running, by rank.

    The records of other ranks stay: thousands of ranks end at the same time.
    """
    folder, host = records.folder(env), cluster.host_name(env)
    recorded = _recorded(folder, _of_this_machine(env["DEPLOYKIT_RUN_DIR"])) if folder else ()
    return {
        rank: cast(ProcessRecord, record)
        for rank, record in sorted(recorded)
        if record["host"] == host and is_running(record["pid"], record["started"])
    }


def _recorded(folder: Path, ranks: set[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of these ranks; of all, where none is known: of a thousand nodes too many."""
    if not ranks:
        yield from records.read_all(folder, "process-*.json", _FIELDS)
    for rank in ranks:
        record = records.valid(folder / f"process-{rank}.json", _FIELDS)
        if record is not None:
            yield rank, record


def _of_this_machine(run: str) -> set[int]:
    """The ranks of a run with a process on this machine, by its environment.

    https://man7.org/linux/man-pages/man5/proc_pid_environ.5.html
    """
    mark, ranks = f"DEPLOYKIT_RUN_DIR={run}".encode(), set[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            variables = path.read_bytes().split(b"\0")
            numbers = filter(None, map(_RANK.fullmatch, variables))
            ranks.update(int(number[1]) for number in numbers if mark in variables)
    return ranks


def is_running(pid: int, started: int) -> bool:
    """Whether a process still runs, and is the one that was started then."""
    state = stat(pid)
    return state is not None and state.started == started


def stat(pid: int) -> Stat | None:
    """What the kernel tells of a process; None for one that is gone, or without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    words = rest.split()
    cpu = int(words[_USER]) + int(words[_USER + 1])
    return Stat(name, words[0], int(words[1]), cpu, int(words[_STARTED]))


def children(pid: int) -> list[int]:
    """The processes below a process, at most `_MOST_CHILDREN`, parents before their children."""
    return trees([pid])[pid]


def trees(pids: Iterable[int]) -> dict[int, list[int]]:
    """The children of each process, as `children` tells them, in one pass over all processes."""
    below: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc") if sys.platform == "linux" else ():  # noqa: PTH208 - faster
        state = stat(int(name)) if name.isdecimal() else None
        if state:
            below[state.parent].append(int(name))
    return {pid: _below(pid, below) for pid in pids}


def _below(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    known = [pid]
    for parent in known:
        known += sorted(children.get(parent, ()))
    return known[1 : _MOST_CHILDREN + 1]


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """The CPU time of each process, in seconds."""
    states = {pid: stat(pid) for pid in pids}
    tick = os.sysconf("SC_CLK_TCK")
    return {pid: state.cpu / tick for pid, state in states.items() if state}


def written(pid: int) -> int:
    """Bytes that a process has passed to write(), for files and pipes; 0 where that is unknown.

    https://man7.org/linux/man-pages/man5/proc_pid_io.5.html
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), 0)
