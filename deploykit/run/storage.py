"""What the state folder holds, how much of the disk it takes, and removing it safely.

A bundle's archive is shared by all runs of the same source: the registry says which runs refer to
it. The unpacked copy that a run works in is its own, since a trainer may write into any file of it.
Once the run has ended, what it did not change is in the archive, and need not be kept twice.

Paths are made of a run's id, never of the registry's text. No link is followed: one in place of a
folder is removed itself, and what it points to stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.bundle import archive as bundle
from deploykit.bundle import node_plane
from deploykit.job.model import State
from deploykit.lib import paths
from deploykit.lib.errors import CannotWrite
from deploykit.run import budgets, registry, sweep_folders
from deploykit.run import registry_layout as layout
from deploykit.run.registry import Run

PARTS = ("source", "output", "checkpoints", "logs")
"""Folders of a run whose sizes are told apart; the rest is `other`."""
_WHOLE = 3
"""The newest runs, whose sources stay whole: to look at them after a failure."""
_MOST_AT_ONCE = 5
"""Sources that are reduced when a run ends: each takes a third of a second for 40 MB."""
_ABANDONED = 3600
"""Seconds without a write after which a scratch folder belongs to no submit any more."""
_PIECE = 1 << 20
"""Bytes that are compared at once."""
_SUFFIX = ".tar.gz"


@dataclass(frozen=True)
class Usage:
    """A file or folder of the state folder and the disk space it takes, in bytes."""

    path: Path
    size: int
    parts: Mapping[str, int]
    """Of a run's folder: bytes by the names of `PARTS`, and `other`."""


def size(path: Path, seen: set[tuple[int, int]] | None = None) -> int:
    """Bytes of disk space that a file or folder takes, as `du` counts: a file with two names once.

    What cannot be read counts nothing. `seen` are files that were counted before.
    """
    seen = set() if seen is None else seen
    total, folders = _blocks(path, seen), [str(path)]
    if path.is_symlink() or not path.is_dir():
        return total
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as items:
            for item in items:
                total += _blocks(item, seen)
                if item.is_dir(follow_symlinks=False):
                    folders.append(item.path)
    return total


def _blocks(item: Path | os.DirEntry[str], seen: set[tuple[int, int]]) -> int:
    """Bytes of one file's own blocks; 0 where it was seen, or has gone."""
    try:
        info = item.stat(follow_symlinks=False)
    except OSError:
        return 0
    if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
        if (info.st_dev, info.st_ino) in seen:
            return 0
        seen.add((info.st_dev, info.st_ino))
    return info.st_blocks * 512


def folder_of(run: str) -> Path | None:
    """The folder of a run; None for what is no run id, as an edited registry may contain."""
    return paths.run_folder(run) if re.fullmatch(registry.RUN_ID, run) else None


def run_usage(run: str) -> Usage | None:
    """What a run's folder takes, by its parts; None where there is no folder."""
    folder = folder_of(run)
    if folder is None or not os.path.lexists(folder):
        return None
    if folder.is_symlink():
        return Usage(folder, size(folder), {})
    parts = dict.fromkeys((*PARTS, "other"), 0)
    seen: set[tuple[int, int]] = set()
    for item in _items(folder):
        parts[item.name if item.name in PARTS else "other"] += size(item, seen)
    return Usage(folder, size(folder), {name: bytes_ for name, bytes_ in parts.items() if bytes_})


def bundles() -> dict[str, Path]:
    """The stored archives, by their hash."""
    stored = (path for path in _items(paths.bundles()) if path.name.endswith(_SUFFIX))
    return {path.name.removesuffix(_SUFFIX): path for path in stored}


def references(rows: Iterable[Run]) -> dict[str, list[str]]:
    """The runs, and the sweeps that have not ended, that refer to each bundle, by its hash."""
    by_bundle: dict[str, list[str]] = {}
    pairs = [*((row.run, row.bundle) for row in rows), *sweep_folders.unfinished().items()]
    for name, digest in pairs:
        by_bundle.setdefault(digest, []).append(name)
    return by_bundle


def unlisted(rows: Iterable[Run]) -> list[Path]:
    """Run folders with results or logs that the registry does not know, as after its loss.

    Whether they are needed is unknown, so they are never removed.
    """
    known = {row.run for row in rows}
    folders = (path for path in _items(paths.state() / "runs") if path.name not in known)
    return [path for path in folders if not _is_empty(path)]


def leftovers(rows: Sequence[Run]) -> list[Path]:
    """What no run needs: archives that none refers to, and scratch of interrupted submits.

    A submit makes its run's folder just before the row, and writes its scratch steadily, so only
    what was not written for an hour counts.
    """
    known, used = {row.run for row in rows}, references(rows)
    unused = [
        path
        for path in _items(paths.state() / "runs")
        if path.name not in known and _is_empty(path)
    ]
    archives = set(bundles().values())
    needed = (
        archives if unlisted(rows) else {path for name, path in bundles().items() if name in used}
    )
    unused += [path for path in _items(paths.bundles()) if path not in needed]
    unused += [path for path in sweep_folders.every() if _is_empty_sweep(path)]
    return [path for path in unused if _abandoned(path)]


def _is_empty(folder: Path) -> bool:
    """Whether nothing came after the lock that a submit begins with."""
    return not folder.is_symlink() and {item.name for item in _items(folder)} <= {"submitting"}


def _is_empty_sweep(folder: Path) -> bool:
    """Whether the definition of a sweep was never written."""
    return not os.path.lexists(folder / sweep_folders.DEFINITION)


def crashes() -> list[Path]:
    """The logs of unexpected errors."""
    return _items(paths.state() / "crashes")


def _items(folder: Path) -> list[Path]:
    """What is in a folder, sorted by name; nothing where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _abandoned(path: Path) -> bool:
    """Whether nothing was written at or just below `path` for an hour."""
    newest = 0.0
    for one in (path, *([] if path.is_symlink() else _items(path))):
        with contextlib.suppress(OSError):
            newest = max(newest, one.lstat().st_mtime)
    return time.time() - newest > _ABANDONED


def remove(path: Path) -> None:
    """Remove a file, a link or a folder two levels below the state folder, with all that is in it.

    What is gone already, also through another process, is no error. Raises CannotWrite where
    something cannot be removed, such as another user's file, or for any other path.
    """
    if path.parent.parent != paths.state() or path.name in {"", ".", ".."}:
        raise CannotWrite(f"{path} is not two levels below {paths.state()}")
    holder = os.open(paths.private_folder(path.parent), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _remove(holder, path)
    except (OSError, RecursionError) as error:
        what = error.strerror if isinstance(error, OSError) else "folders are nested too deeply"
        raise CannotWrite(
            f"{path} cannot be removed: {what}",
            hint="make sure that nothing in it is in use or belongs to others, then try again",
        ) from error
    finally:
        os.close(holder)


def _remove(holder: int, path: Path) -> None:
    """Remove what has the name of `path` in the open folder `holder`."""
    try:
        if not stat.S_ISDIR(os.lstat(path.name, dir_fd=holder).st_mode):
            os.unlink(path.name, dir_fd=holder)
            return
    except FileNotFoundError:
        return
    try:
        _remove_folder(holder, path.name)
    except PermissionError:
        _open_up(path)
        _remove_folder(holder, path.name)


def _remove_folder(holder: int, name: str) -> None:
    try:
        _rmtree(holder, name)
    except OSError as error:
        # another process wrote into it meanwhile, as one that removes the same run and locks it
        if error.errno != errno.ENOTEMPTY:
            raise
        _rmtree(holder, name)


def _rmtree(holder: int, name: str) -> None:
    def stop_unless_gone(_function: object, _path: object, raised: Any) -> None:
        if not isinstance(raised[1], FileNotFoundError):
            raise raised[1]

    shutil.rmtree(name, dir_fd=holder, onerror=stop_unless_gone)


def _open_up(path: Path) -> None:
    """Let the owner into every folder: some caches are folders without write permission."""
    path.chmod(stat.S_IRWXU)
    for folder, below, _ in os.walk(path):
        for name in below:
            closed = Path(folder, name)
            if not closed.is_symlink():
                closed.chmod(stat.S_IRWXU)


def remove_run(row: Run) -> None:
    """Remove a run's folder, its row, and its bundle if no other run or sweep refers to it.

    The row goes after the folder, so that an interrupted removal can be repeated. Raises as
    `remove`.
    """
    folder = folder_of(row.run)
    budgets.settle(row)
    if folder is not None:
        remove(folder)
    registry.remove(row.run)
    archive = bundles().get(row.bundle)
    if archive is not None:
        discard(archive)


def discard(path: Path) -> None:
    """Remove one of `leftovers` or `crashes`, unless a submit or a sweep has begun to use it."""
    name = path.name.removesuffix(_SUFFIX)
    if path.parent.name == "runs" and name in registry.lookup(name):
        return
    if path.parent == paths.bundles() and name in sweep_folders.unfinished().values():
        return
    if path.parent == paths.bundles():
        registry.release(name, lambda: remove(path))
    else:
        remove(path)


def whole(rows: Iterable[Run]) -> list[Run]:
    """The runs whose sources can be reduced: they have ended, and are not the newest.

    `rows` are all runs, the newest first.
    """
    return list(filter(_is_whole, list(rows)[_WHOLE:]))


def _is_whole(row: Run) -> bool:
    folder = folder_of(row.run)
    return (
        folder is not None
        and folder == Path(row.folder)
        and State(row.state).final
        and row.state != State.UNSENT.value
        and (folder / "source" / backend.LAUNCH).is_file()
    )


def tidy() -> None:
    """Reduce the sources of a few runs that have ended, each once, to what the runs wrote."""
    _reduce_all(filter(_is_whole, _next_to_reduce()))


def tidy_all() -> None:
    """The same for all runs, also those that were tried before."""
    _reduce_all(whole(registry.every()))


def _reduce_all(rows: Iterable[Run]) -> None:
    for row in rows:
        with contextlib.suppress(OSError):
            reduce(paths.run_folder(row.run), row.bundle)


def _next_to_reduce() -> list[Run]:
    """The newest ended runs that no call has returned yet, but none of the newest of all."""
    newest = "ORDER BY created DESC, run DESC LIMIT"
    kept = f"SELECT run FROM runs {newest} {_WHOLE}"  # noqa: S608 - ours, as below
    chosen = f"WHERE {layout.TO_REDUCE} AND run NOT IN ({kept}) {newest} {_MOST_AT_ONCE}"
    query = f"SELECT run FROM runs {chosen}"  # noqa: S608 - ours
    with registry.writing() as database:
        ids = [row["run"] for row in database.execute(query)]
        marks = ((run,) for run in ids)
        database.executemany("UPDATE runs SET reduced = 1 WHERE run = ?", marks)
    rows = registry.lookup(*ids)
    return [rows[run] for run in ids if run in rows]


def reduce(folder: Path, digest: str) -> None:
    """Remove from ``source`` in a run's folder the files that the archive of the bundle has too.

    ``files.json`` stays, which says what they were. Does nothing without the right archive.
    """
    source = folder / "source"
    archive = bundles().get(digest)
    if archive is None or not all(map(paths.is_private_folder, (folder, source))):
        return
    emptied = set()
    for path in _unchanged(archive, digest, source):
        if path != node_plane.FILES:
            (source / path).unlink()
            emptied |= set(Path(path).parents)
    for below in sorted(emptied - {Path()}, reverse=True):
        _remove_if_empty(source / below)


def _unchanged(archive: Path, digest: str, source: Path) -> Iterator[str]:
    """The files and links of the bundle `digest` that are the same in `source` as in its `archive`.

    None where this is not its archive. A folder that the run replaced by a link has none.
    """
    if not bundle.holds(archive, digest):
        return
    top = source.resolve()
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = top / member.name
            with contextlib.suppress(OSError):
                if path.parent.resolve() == path.parent and _is_same(tar, member, path):
                    yield member.name


def _is_same(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bool:
    if member.issym():
        return str(path.readlink()) == member.linkname
    with paths.open_regular(path) as on_disk:
        stored = tar.extractfile(member)
        if stored is None or os.fstat(on_disk.fileno()).st_size != member.size:
            return False
        while piece := stored.read(_PIECE):
            if on_disk.read(len(piece)) != piece:
                return False
        return True


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder in which nothing is left but what Python cached of its modules."""
    if {item.name for item in _items(folder)} == {"__pycache__"}:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder / "__pycache__")
    with contextlib.suppress(OSError):
        folder.rmdir()
