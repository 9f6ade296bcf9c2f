"""What the program has written into its working folder, into output and into checkpoints.

A script that knows nothing of deploykit saves into its working folder, the unpacked source. Here
its files are told from those that came with the source, for `outputs` and for the exit record
``written.json``, which `deploykit status` and `wait` show.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from deploykit_node import exit_records, log, records
from deploykit_node.cluster import Environ
from deploykit_node.records import FilesRecord, WrittenRecord

_LISTING = ".deploykit/files.json"
"""The list of the bundle's files, with mode and size (`deploykit/bundle/archive.py`)."""
_CLUTTER = frozenset({".deploykit", "__pycache__"})
"""Folders of the launcher and of Python, which are no results."""
_MOST = 100_000
"""Files of a folder that are counted."""
_LARGEST = 10
"""Files that are recorded by name."""
_LOGGED = 5
"""Files that a line of the log names."""
PART = ".deploykit-part"
"""Ending of a file that is being copied."""
KEPT = "working_folder"
"""The folder of the checkpoints that keeps the files that `outputs` names."""


class File(NamedTuple):
    """A regular file: its path below a folder, its size in bytes and its time in nanoseconds."""

    path: str
    size: int
    modified: int


def files(folder: Path) -> Iterator[File]:
    """Every regular file below `folder`. Follows no link; skips what cannot be read."""
    if not folder.is_dir():
        return
    for root, folders, names, descriptor in os.fwalk(folder):
        folders[:] = sorted(name for name in folders if name not in _CLUTTER)
        below = os.path.relpath(root, folder)
        for name in sorted(names):
            with contextlib.suppress(OSError):
                info = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) and not name.endswith(PART):
                    path = name if below == "." else f"{below}/{name}"
                    yield File(path, info.st_size, info.st_mtime_ns)


def new(folder: Path, env: Environ) -> Iterator[File]:
    """The files of the working folder that did not come with the source, or have changed since."""
    listing = folder / _LISTING
    try:
        came = dict(json.loads(listing.read_bytes()))
        began = _began(env) or listing.stat().st_mtime_ns
    except (OSError, ValueError, TypeError):
        came, began = {}, 0
    for file in files(folder):
        known = came.get(file.path)
        same_size = isinstance(known, list) and known[-1:] == [file.size]
        if not (same_size and file.modified <= began):
            yield file


def record(env: Environ, folder: Path, patterns: list[str]) -> None:
    """Leave the record of what was written, if the run has a folder for it."""
    own = records.folder(env)
    if own is None:
        return
    output = Path(env.get("DEPLOYKIT_OUTPUT_DIR", ""))
    checkpoints = Path(env.get("DEPLOYKIT_CHECKPOINT_DIR", ""))
    content: WrittenRecord = {
        "attempt": exit_records.attempt(env),
        "working_folder": _summary(folder, new(folder, env)),
        "output": _summary(output, _of_run(output, env)),
        "checkpoints": _summary(checkpoints, _checkpoints(checkpoints, output, env)),
        "outputs": patterns,
    }
    records.write(own / "written.json", content)


def _of_run(folder: Path, env: Environ) -> Iterator[File]:
    """The files that were written since the run began; others may have written there before."""
    began = _began(env) or 0
    return (file for file in files(folder) if file.modified >= began)


def _checkpoints(folder: Path, output: Path, env: Environ) -> Iterator[File]:
    """The run's files in the checkpoint folder, without those that are listed elsewhere."""
    if not folder.is_relative_to(output):
        yield from (file for file in _of_run(folder, env) if not file.path.startswith(f"{KEPT}/"))


def say(env: Environ, folder: Path, node: int, *, named: bool) -> None:
    """Log what was written into a working folder that is lost when the container ends."""
    listed = _summary(folder, new(folder, env)) if env.get("DEPLOYKIT_RUN") else None
    if listed and listed["count"]:
        hint = "" if named else "; to keep them, name them in `outputs` of the job file"
        log.say(node, f"written in the working folder: {_text(listed)}{hint}")


def named(listed: Iterable[File]) -> str:
    """``2 files, 1.5 MB: a.pt (1.4 MB), b.log (20 B)``."""
    return _text(_summary(Path(), listed))


def readable(size: float) -> str:
    """A number of bytes as text, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:  # noqa: PLR2004 - the step between two units
            return f"{size:.1f} {unit}".replace(".0 ", " ")
        size /= 1000
    return f"{size:.1f} GB"


def _began(env: Environ) -> int | None:
    """When the run started for the first time, by the clock of the run folder's disk."""
    run = env.get("DEPLOYKIT_RUN_DIR")
    try:
        return Path(run, "claim").lstat().st_mtime_ns if run else None
    except OSError:
        return None


def _summary(folder: Path, listed: Iterable[File]) -> FilesRecord:
    counted = list(itertools.islice(listed, _MOST))
    largest = sorted(counted, key=lambda file: (-file.size, file.path))[:_LARGEST]
    return {
        "folder": str(folder),
        "count": len(counted),
        "bytes": sum(file.size for file in counted),
        "largest": [(file.path, file.size) for file in largest],
    }


def _text(listed: FilesRecord) -> str:
    count = listed["count"]
    shown = [f"{ascii(path)[1:-1]} ({readable(size)})" for path, size in listed["largest"]]
    more = ", ..." if count > _LOGGED else ""
    total = f"{count} file{'' if count == 1 else 's'}, {readable(listed['bytes'])}"
    return f"{total}: {', '.join(shown[:_LOGGED])}{more}"
