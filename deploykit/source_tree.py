"""The files of a source folder that may travel, and their bytes as they were when it was read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploykit import paths
from deploykit.errors import JobFileError, TryAgain
from deploykit.ignore import Rules
from deploykit.model import Problem
from deploykit.paths import OpenFolder

_PIECE = 1 << 20
"""Bytes that are read at once."""


@dataclass(frozen=True)
class Entry:
    """A file or link of the bundle. `path` is relative, with forward slashes."""

    path: str
    mode: int = 0o644
    size: int = 0
    """Bytes; 0 for a link."""
    target: str | None = None
    """Where a link points; None for a file."""
    content: bytes | None = None
    """Content of a file of the node plane; None: read from the source folder."""


def walk(source: Path, rules: Rules, problems: list[Problem]) -> Iterator[Entry]:
    """Every file and link below `source` that is not ignored; what cannot travel is a problem."""
    top, state = os.path.realpath(source), str(paths.state())
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            rules.enter(folder)
            found = sorted(os.scandir(source / folder), key=lambda item: item.name)
        except OSError as error:
            problems.append(_unreadable(folder or ".", error))
            continue
        for item in found:
            path = f"{folder}{item.name}"
            is_folder = item.is_dir(follow_symlinks=False)
            # deploykit's own folder may lie inside a source folder
            if rules.ignored(path, is_folder=is_folder) or os.path.abspath(item.path) == state:  # noqa: PTH100 - keeps links
                continue
            if is_folder:
                folders.append(f"{path}/")
                continue
            entry = _link(item, path, top) if item.is_symlink() else _file(item, path)
            if isinstance(entry, Problem):
                problems.append(entry)
            else:
                yield entry


def opened(source: Path) -> OpenFolder:
    """The source folder, for `pieces`. Raises TryAgain when it is no longer there."""
    try:
        return OpenFolder(source)
    except OSError as error:
        raise changed(str(source)) from error


def pieces(top: OpenFolder, entry: Entry) -> Iterator[bytes]:
    """The bytes of a file that `walk` found, some MiB at a time.

    Raises TryAgain when it is no longer what it was, JobFileError when it cannot be read.
    """
    left = entry.size
    try:
        with top.open(entry.path) as file:
            while piece := file.read(min(left + 1, _PIECE)):
                left -= len(piece)
                if left < 0:
                    break
                yield piece
    except PermissionError as error:
        raise JobFileError("the source folder", [_unreadable(entry.path, error)]) from error
    except OSError as error:
        raise changed(entry.path) from error
    if left:
        raise changed(entry.path)


def changed(path: str) -> TryAgain:
    """The error for a source that is being written to."""
    return TryAgain(
        f"{path} changed while it was being bundled",
        hint="submit again; list files that are always being written to in .deploykitignore",
    )


def _file(item: os.DirEntry[str], path: str) -> Entry | Problem:
    if not item.is_file(follow_symlinks=False):
        return _problem(path, "is neither a file, a folder nor a link")
    if not os.access(item.path, os.R_OK):
        return _problem(path, "cannot be read")
    try:
        info = item.stat(follow_symlinks=False)
    except OSError as error:
        raise changed(path) from error
    return Entry(path, 0o755 if info.st_mode & stat.S_IXUSR else 0o644, info.st_size)


def _link(item: os.DirEntry[str], path: str, top: str) -> Entry | Problem:
    """The link itself travels, so what it says is read once, and judged as it was then."""
    try:
        target = os.readlink(item.path)  # noqa: PTH115 - as it is written
    except OSError as error:
        raise changed(path) from error
    end = os.path.realpath(os.path.join(os.path.dirname(item.path), target))  # noqa: PTH118, PTH120 - Path.resolve() raises on a loop of links
    if target.startswith("/") or os.path.commonpath([end, top]) != top:
        return _problem(path, f"is a link that leaves the source folder, to {target}")
    return Entry(path, 0o777, target=target)


def _unreadable(path: str, error: OSError) -> Problem:
    name = os.path.basename(error.filename or "")  # noqa: PTH119 - may be a number
    where = f"{path.removesuffix('/')}: {name}" if name.startswith(".") and name != path else path
    return _problem(where, f"cannot be read: {error.strerror}")


def _problem(path: str, what: str) -> Problem:
    return Problem("source", f"{path} {what}", "name it in .deploykitignore, or replace it")
