"""The dump of a run, as its nodes have written it: untrusted data as values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploykit.job.decode import read_json

FOLDER = "stacks"
"""In a run folder: a folder for each dump, named by its time, with a file for each node."""

_MOST = 10_000
"""Most ranks of a node, threads of a process and frames of a thread."""


@dataclass(frozen=True)
class Frame:
    """One call. `line` is 0 where it is not known, as for C and C++."""

    name: str
    file: str
    line: int
    source: str = ""
    """The line of the file, empty where the node could not read it."""


@dataclass(frozen=True)
class Thread:
    """One thread of a process, its innermost call first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Process:
    """A process; `state` is the kernel's letter, such as ``S`` for sleeping."""

    pid: int
    name: str
    state: str
    threads: tuple[Thread, ...]
    """The main thread first; none where it runs no Python."""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Those of the main thread."""
        return self.threads[0].frames if self.threads else ()


@dataclass(frozen=True)
class RankStacks:
    """The program of one rank and the processes that it has started."""

    rank: int
    host: str
    tool: str
    """What has read the stacks; empty where nothing could."""
    problem: str
    """Why a better way did not work."""
    process: Process
    children: tuple[Process, ...] = ()


@dataclass(frozen=True)
class Dump:
    """The stacks of the ranks of a run that were running, by rank."""

    folder: Path
    time: datetime | None
    ranks: tuple[RankStacks, ...]
    world_size: int
    """Ranks that the run should have; 0 where no node tells."""

    @property
    def absent(self) -> list[int]:
        """Ranks without a running process on a node that answered."""
        present = {one.rank for one in self.ranks}
        return [rank for rank in range(min(self.world_size, _MOST)) if rank not in present]


def read(folder: Path) -> Dump:
    """The dump in a folder. Files that no node has written whole are left out."""
    nodes = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            nodes.append(read_json(path))
    nodes = [node for node in nodes if isinstance(node, dict)]
    ranks = {one.rank: one for node in nodes for one in _ranks(node)}
    sizes = (node.get("world_size") for node in nodes)
    size = max((size for size in sizes if isinstance(size, int)), default=0)
    times = [time for node in nodes if (time := _time(node.get("time")))]
    ordered = tuple(ranks[rank] for rank in sorted(ranks))
    return Dump(folder, max(times, default=None), ordered, max(0, size))


def newest(run_folder: Path) -> Path | None:
    """The folder of the last dump of a run; None without one."""
    folders = [path for path in (run_folder / FOLDER).glob("*") if any(path.glob("*.json"))]
    return max(folders, key=lambda path: path.name, default=None)


def _time(text: object) -> datetime | None:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        moment = datetime.fromisoformat(str(text))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    return None


def _ranks(node: dict[str, Any]) -> Iterator[RankStacks]:
    for data in _list(node.get("ranks")):
        match data:
            case {"rank": int(rank), "tool": str(tool), "problem": str(problem)} if rank >= 0:
                process = _process(data.get("process"))
                children = tuple(map(_process, _list(data.get("children"))))
                host = str(node.get("host", ""))
                yield RankStacks(rank, host, tool, problem, process, children)


def _process(data: object) -> Process:
    match data:
        case {"pid": int(pid), "name": str(name), "state": str(state), "threads": [*threads]}:
            return Process(pid, name, state, tuple(_threads(threads)))
    return Process(0, "", "", ())


def _threads(listed: list[Any]) -> Iterator[Thread]:
    for data in listed[:_MOST]:
        match data:
            case {"name": str(name), "frames": [*frames]}:
                yield Thread(name, tuple(_frames(frames)))


def _frames(listed: list[Any]) -> Iterator[Frame]:
    for data in listed[:_MOST]:
        match data:
            case {"name": str(name), "file": str(file), "line": int(line), "source": str(source)}:
                yield Frame(name, file, line, source)


def _list(data: object) -> list[Any]:
    return data[:_MOST] if isinstance(data, list) else []
