"""Whether a trainer has written a checkpoint, judged by what is new in its folder.

A trainer may use files or folders with any name. What looks unfinished does not count: hidden
names, the usual endings of a file that is being written, and a folder of
``torch.distributed.checkpoint`` without the ``.metadata`` that it writes last. Of the files that
`outputs` keeps there, only those that are named like a checkpoint count: a log is no progress.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from deploykit_node import outputs
from deploykit_node.outputs import KEPT

Snapshot = Mapping[str, int]
"""The complete entries of the folder, each with its last modification in nanoseconds."""

_SKEW = 5.0
"""Seconds by which two clocks may differ."""
METADATA = ".metadata"
UNFINISHED = re.compile(r"^\.|[._-](tmp|temp|part|partial|incomplete|writing|saving)$")
ENDINGS = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".distcp", ".tar")


def snapshot(folder: str) -> Snapshot:
    """The folder's state now; empty if it is no readable folder."""
    if not folder or "://" in folder:
        return {}
    try:
        with os.scandir(folder) as entries:
            modified = dict(_modified(entry) for entry in entries if _is_complete(entry))
    except OSError:
        return {}
    kept = outputs.files(Path(folder, KEPT))
    return modified | {
        f"{KEPT}/{file.path}": file.modified for file in kept if file.path.endswith(ENDINGS)
    }


def newest(before: Snapshot, folder: str, since: float = 0.0) -> str | None:
    """The name of the newest checkpoint that is new or changed since `before`; None without one.

    With `since`, in seconds since the epoch, only one that was written after that, as far as the
    clocks of this node and of the folder's server agree.
    """
    now = snapshot(folder)
    earliest = (since - _SKEW) * 1e9
    fresh = [name for name, time in now.items() if before.get(name) != time and time >= earliest]
    return max(fresh, key=now.__getitem__, default=None)


def _is_complete(entry: os.DirEntry[str]) -> bool:
    if UNFINISHED.search(entry.name) or entry.name == KEPT:
        return False
    if not entry.is_dir() or Path(entry.path, METADATA).exists():
        return True
    return next(Path(entry.path).glob("*.distcp"), None) is None


def _modified(entry: os.DirEntry[str]) -> tuple[str, int]:
    return entry.name, max(_times(entry))


def _times(entry: os.DirEntry[str]) -> Iterator[int]:
    yield entry.stat().st_mtime_ns
    if not entry.is_dir():
        return
    try:
        yield Path(entry.path, METADATA).stat().st_mtime_ns  # the last of thousands of shards
    except FileNotFoundError:
        with os.scandir(entry.path) as inside:
            for file in inside:
                yield file.stat().st_mtime_ns
