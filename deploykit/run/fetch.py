"""Copy what a run left elsewhere to this machine: its results, its checkpoints, its logs.

`deploykit fetch` writes below one folder: ``output/``, ``checkpoints/``, ``model/`` and
``logs.txt``. What is complete there is listed in `_RECORD` and not copied again.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import tarfile
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from deploykit.backends import base as backend
from deploykit.backends.base import RemoteFile
from deploykit.bundle import source_tree
from deploykit.lib import progress, untar
from deploykit.lib.errors import CannotWrite, NotFound, TryAgain
from deploykit.run.registry import Run

PARTS = ("output", "checkpoints")
_RECORD = source_tree.FETCHED
"""In the target folder: each complete file, with the size and time that the original had.

So a file that was changed here afterwards is not replaced. What a killed fetch has not recorded is
known by its time.
"""
_SAME_TIME = 1e-5
"""Seconds: more than what is lost where a time is written as a float."""
_QUOTED = 10
"""Files that an error message lists."""
ARCHIVES = {"output.tar.gz": "output", "model.tar.gz": "model"}
"""SageMaker's archives among the results, and the folder that each is unpacked into."""


class Listed(NamedTuple):
    """A file of a run, and where it goes below the target folder."""

    part: str
    file: RemoteFile

    @property
    def path(self) -> str:
        return f"{self.part}/{self.file.name}"


class Listing(NamedTuple):
    """The files of some parts of a run."""

    files: list[Listed]
    here: frozenset[str]
    """The parts that are on this machine."""


def listing(row: Run, parts: Sequence[str]) -> Listing:
    """List the files of these parts of a run; queries the target once per part.

    Raises NotFound if the job was never confirmed, and what the target raises.
    """
    if row.handle is None:
        raise NotFound(f"{row.backend} never confirmed {row.run}, so it has no files")
    engine = backend.find(row.backend)
    files, here = list[Listed](), set[str]()
    for part in parts:
        remote = engine.files(row.handle, part) if backend.offers(engine, "files") else None
        if remote is None:
            here.add(part)
        checked = _local_files(folder_here(row, part)) if remote is None else _checked(remote)
        files += [Listed(part, file) for file in checked]
    return Listing(files, frozenset(here))


def matching(row: Run, files: list[Listed], patterns: Sequence[str]) -> list[Listed]:
    """The files that match a pattern, or all without one. Raises NotFound if none matches.

    A pattern matches a file's whole path or a folder above it; ``*`` matches any characters.
    """
    if not patterns:
        return files
    chosen = [one for one in files if any(_matches(one.file.name, each) for each in patterns)]
    if not chosen:
        names = ", ".join(one.path for one in files[:_QUOTED])
        more = ", ..." if len(files) > _QUOTED else ""
        raise NotFound(
            f"no file of {row.run} matches {' '.join(patterns)}",
            hint=f"files: {names}{more}" if files else "the run has no files there",
        )
    return chosen


def _matches(name: str, pattern: str) -> bool:
    return any(
        fnmatch.fnmatchcase(str(path), pattern.rstrip("/"))
        for path in (PurePosixPath(name), *PurePosixPath(name).parents)
    )


def folder_here(row: Run, part: str) -> Path:
    """The folder of a part that is on this machine."""
    return Path(row.job_data().get(part) or Path(row.folder) / part).expanduser()


def _checked(files: Sequence[RemoteFile]) -> Iterator[RemoteFile]:
    for file in files:
        path = PurePosixPath(file.name)
        if path.is_absolute() or ".." in path.parts:
            raise CannotWrite(
                f"cannot fetch {file.address}: its path leads outside the target folder"
            )
        yield file


def _local_files(folder: Path) -> Iterator[RemoteFile]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            info, name = path.stat(), path.relative_to(folder).as_posix()
            yield RemoteFile(name, info.st_size, info.st_mtime, str(path))


def missing(files: Sequence[Listed], target: Path) -> list[Listed]:
    """Those that are not complete in `target` as they are now."""
    complete = _read_record(target)

    def is_here(one: Listed) -> bool:
        is_recorded = complete.get(one.path) == [one.file.size, one.file.modified]
        if one.file.name in ARCHIVES:
            return is_recorded
        return (target / one.path).exists() if is_recorded else _has_arrived(one, target)

    return [one for one in files if not is_here(one)]


def is_target(folder: Path) -> bool:
    """Whether `fetch` has copied a run's files to a folder; by default it has the run's name."""
    return (folder / _RECORD).is_file()


def fetch(row: Run, files: Sequence[Listed], here: Collection[str], target: Path) -> None:
    """Copy files into `target` and unpack SageMaker's archives there.

    `here` names the parts that are on this machine.
    After an interruption the next call copies what is missing. Raises what the target raises.
    """
    if not files:
        return
    total, so_far = sum(one.file.size for one in files), 0
    lock = threading.Lock()

    def done(count: int) -> None:
        nonlocal so_far
        with lock:  # several files arrive at once
            so_far += count
            if progress.show:
                progress.show("fetching", so_far, total)

    try:
        target.mkdir(parents=True, exist_ok=True)
        _record(target, [])  # the folder is no source, even if this is interrupted
        for part in sorted({one.part for one in files}):
            chosen = [one for one in files if one.part == part]
            _fetch_part(row, chosen, target, done, is_here=part in here)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise CannotWrite(
            f"cannot copy to {target}: {error.strerror}{where}",
            hint="free some space there or choose another folder with --to, and run the command "
            "again; complete files are not copied again",
        ) from error


def _fetch_part(
    row: Run, chosen: Sequence[Listed], target: Path, done: Callable[[int], None], *, is_here: bool
) -> None:
    """Copy files of one part. Raises OSError where `target` cannot be written."""
    part = chosen[0].part
    for folder in sorted({(target / one.path).parent for one in chosen}):
        folder.mkdir(parents=True, exist_ok=True)
    missing = [one.file for one in chosen if not _has_arrived(one, target)]
    plain = [one for one in chosen if one.file.name not in ARCHIVES]
    try:
        if is_here:
            _copy(missing, target / part, done)
        elif row.handle is not None:
            engine = backend.require(row.backend, "download")
            engine.download(row.handle, missing, target / part, done)
    except BaseException:
        _record(target, [one for one in plain if _has_arrived(one, target)])
        raise
    _record(target, plain)
    for one in chosen:
        if one.file.name in ARCHIVES:
            _unpack(target / one.path, target / ARCHIVES[one.file.name])
            _record(target, [one])


def _copy(files: Sequence[RemoteFile], folder: Path, done: Callable[[int], None]) -> None:
    """Copy files of this machine; each gets its name once it is complete."""
    for file in files:
        path = folder / file.name
        temporary = path.with_name(f".{path.name}.part")
        shutil.copy2(file.address, temporary)
        temporary.replace(path)
        done(file.size)


def _has_arrived(one: Listed, target: Path) -> bool:
    """Whether the target has this state of a file, by size and time."""
    try:
        info = (target / one.path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    is_same_time = abs(info.st_mtime - one.file.modified) < _SAME_TIME
    return info.st_size == one.file.size and is_same_time


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack with the filter for untrusted data (PEP 706), and remove the archive.

    Raises CannotWrite for a member that would leave the folder, TryAgain for a damaged archive.
    """
    try:
        with tarfile.open(archive) as opened:
            untar.extract_all(opened, folder)
    except untar.UnsafeMemberError as error:
        raise CannotWrite(
            f"cannot unpack {archive}: {error}", hint="unpack the archive by hand"
        ) from error
    except (tarfile.TarError, zlib.error, EOFError) as error:
        archive.unlink()
        raise TryAgain(f"{archive} is damaged: {error}", hint="run the command again") from error
    archive.unlink()


def _read_record(target: Path) -> dict[str, list[float]]:
    try:
        return dict(json.loads((target / _RECORD).read_text()))
    except (OSError, ValueError):
        return {}


def _record(target: Path, complete: Sequence[Listed]) -> None:
    known = _read_record(target)
    known |= {one.path: [one.file.size, one.file.modified] for one in complete}
    temporary = target / f"{_RECORD}.new"
    temporary.write_text(json.dumps(known))
    temporary.replace(target / _RECORD)
