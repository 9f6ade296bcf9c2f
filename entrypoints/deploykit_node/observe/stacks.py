"""Stacks as data: what a dump holds of each rank, and the source lines of its frames."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TypedDict

_LARGEST = 1 << 21
"""Bytes of a source file that is read for its lines."""
_LONGEST = 160
"""Characters of a source line."""
_FRAMES = 200
_THREADS = 200
"""Most frames of a thread, and threads of a process, that are kept."""


class Frame(TypedDict):
    """One call; `source` is its line of the file, empty where that cannot be read."""

    name: str
    file: str
    line: int
    source: str


class Thread(TypedDict):
    """One thread; `frames` begin with the innermost call."""

    name: str
    frames: list[Frame]


class ProcessStacks(TypedDict):
    """One process: its threads, the main one first, and the kernel's letter for its state."""

    pid: int
    name: str
    state: str
    threads: list[Thread]


class RankStacks(TypedDict):
    """The program of one rank and its child processes.

    `tool` is ``py-spy`` or ``faulthandler``; empty where neither worked, and `problem` says why.
    """

    rank: int
    tool: str
    problem: str
    process: ProcessStacks
    children: list[ProcessStacks]


class NodeStacks(TypedDict):
    """The dump of one node, a file in ``stacks/`` of the run folder."""

    host: str
    time: str
    world_size: int
    ranks: list[RankStacks]


class NoStacks(Exception):
    """The stacks of a process cannot be had in this way; the message says why."""


def with_sources(threads: Iterable[Thread]) -> list[Thread]:
    """The threads, as many as are kept, with the source line of each frame."""
    kept = [Thread(name=one["name"], frames=one["frames"][:_FRAMES]) for one in threads][:_THREADS]
    for thread in kept:
        for frame in thread["frames"]:
            frame["source"] = _source(frame["file"], frame["line"])
    return kept


def _source(file: str, line: int) -> str:
    lines = _lines(file) if line > 0 and os.path.isabs(file) else ()  # noqa: PTH117 - many calls
    return lines[line - 1].strip()[:_LONGEST] if line <= len(lines) and lines else ""


@lru_cache(256)
def _lines(file: str) -> tuple[str, ...]:
    """The lines of a regular file; none of one that cannot be read."""
    try:
        path = Path(file)
        info = path.stat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > _LARGEST:
            return ()
        return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except (OSError, ValueError):
        return ()
