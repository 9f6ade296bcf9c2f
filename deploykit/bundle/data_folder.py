"""A folder or file of `data` that is uploaded: its files, and the hash that names its content.

Files are left out by ``.deploykitignore`` and by the names that never travel, as from a source
folder. git's rules do not count: data are often in ``.gitignore``. A link is replaced by what it
names, as the trainer sees it.

Checksums are those that S3 stores, so that S3 can be asked whether it has a file: SHA-256, or for a
file of several parts the SHA-256 of theirs and their number.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
The state folder keeps them with the size, times and inode of each file; a file is read again only
if one of these has changed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from deploykit.bundle.source_tree import IgnoreRules
from deploykit.job.model import DataFile, DataFolder, Problem
from deploykit.lib import paths, progress
from deploykit.lib.errors import JobFileError, TryAgain

PART = 8 * 1024**2
"""Bytes of a part, and the size from which a file has parts: the defaults of boto3."""
_MAX_PARTS = 10_000
_BLOCK = 1024**2
_LONGEST_PATH = 800
"""Bytes. A key of S3 has at most 1,024, with its prefix."""
_SETTLED = 0.1
"""Seconds after a change of a file in which another may leave its times as they are."""
_SHOWN = 3

_Stat = tuple[str, os.stat_result]
"""The path of a file, and what is known of it without reading it."""


def scan(channel: str, location: str) -> DataFolder:
    """Read a folder or file as it would be uploaded. Writes nothing.

    Raises JobFileError with every file that cannot be used, TryAgain if one changes meanwhile.
    """
    source = Path(location)
    walked, problems = _listed(channel, source)
    if any(problem.severity == "error" for problem in problems):
        raise JobFileError(f"the data in {source}", problems)
    is_file = source.is_file()
    top = source.parent if is_file else source
    files = tuple(_checked(top, sorted(walked, key=lambda one: one[0]), _known(source)))
    listed = [[file.path, file.size, file.checksum] for file in files]
    manifest = json.dumps({"files": listed}, separators=(",", ":")) + "\n"
    return DataFolder(
        channel,
        source,
        files,
        is_file,
        manifest,
        hashlib.sha256(manifest.encode()).hexdigest(),
        warnings=tuple(problems),
    )


def errors(channel: str, location: str) -> Iterator[Problem]:
    """What `scan` would raise for a folder or file, if it exists; reads no content."""
    if os.path.exists(location):  # noqa: PTH110 - pathlib's raises for a name that is too long
        _, problems = _listed(channel, Path(location))
        yield from (problem for problem in problems if problem.severity == "error")


def _listed(channel: str, source: Path) -> tuple[list[_Stat], list[Problem]]:
    """The files to upload, and what is wrong with them."""
    problems = list[Problem]()
    is_file = source.is_file()
    walked = [(source.name, source.stat())] if is_file else list(_walk(channel, source, problems))
    return walked, [*problems, *_unusable(channel, source, walked)]


def remember(folders: Iterable[DataFolder]) -> None:
    """Keep the checksums of all files, so that the next scan reads only what has changed.

    Warns where the state folder is full.
    """
    for folder in folders:
        cache = _cache(folder.source)
        known = {
            file.path: [file.size, *file.stamp, file.checksum, list(file.parts)]
            for file in folder.files
        }
        if known == _known(folder.source):
            continue
        paths.private_folder(cache.parent)
        temporary = cache.with_suffix(f".{os.getpid()}")
        try:
            paths.write(temporary, json.dumps(known))
            temporary.replace(cache)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            progress.warn(
                f"warning: the checksums of {folder.source} were not saved, so the next submit "
                f"reads all files again: {error.strerror}"
            )


def _cache(source: Path) -> Path:
    return paths.state() / "data" / f"{hashlib.sha256(os.fsencode(source)).hexdigest()}.json"


def _known(source: Path) -> Mapping[str, list[Any]]:
    """The size, stamp, checksum and parts of each file when it was last read."""
    try:
        return dict(json.loads(_cache(source).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _walk(channel: str, source: Path, problems: list[Problem]) -> Iterator[_Stat]:
    """Every file below `source` that is not ignored; unusable ones become problems."""
    key, withheld = f"data.{channel}", list[str]()
    rules = IgnoreRules(source, git=False)
    folders: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())]
    while folders:
        folder, above = folders.pop()
        try:
            info = (source / folder).stat()
            rules.enter(folder)
            items = list(os.scandir(source / folder))
        except OSError as error:
            problems.append(_problem(key, folder or ".", f"cannot be read: {error.strerror}"))
            continue
        if (info.st_dev, info.st_ino) in above:
            problems.append(_problem(key, folder, "is a link to a folder that contains it"))
            continue
        for item in items:
            path, is_folder = f"{folder}{item.name}", item.is_dir()
            if rules.ignored(path, is_folder=is_folder):
                if rules.withheld(path, is_folder=is_folder):
                    withheld.append(path)
            elif is_folder:
                folders.append((f"{path}/", (*above, (info.st_dev, info.st_ino))))
            elif why := _unreadable(item):
                problems.append(_problem(key, path, why))
            else:
                yield path, item.stat()
    if withheld:
        problems.append(_left_out(key, sorted(withheld)))


def _unreadable(item: os.DirEntry[str]) -> str:
    """Why a file cannot be uploaded; empty if it can."""
    if not item.is_file():
        return "is a broken link" if item.is_symlink() else "is neither a file nor a folder"
    return "" if os.access(item.path, os.R_OK) else "cannot be read: permission denied"


def _left_out(key: str, withheld: list[str]) -> Problem:
    more = f" and {len(withheld) - _SHOWN} more" if len(withheld) > _SHOWN else ""
    return Problem(
        key,
        f"files left out because their names suggest secrets: {', '.join(withheld[:_SHOWN])}{more}",
        f"to include it, add !{withheld[0]} to .deploykitignore in the data folder",
        severity="warning",
    )


def _problem(key: str, path: str, what: str) -> Problem:
    return Problem(key, f"{path} {what}", "add it to .deploykitignore, or replace it")


def _unusable(channel: str, source: Path, files: list[_Stat]) -> Iterator[Problem]:
    key = f"data.{channel}"
    if not files:
        yield Problem(key, f"{source} has no files to upload", "correct the path")
    for path, _ in files:
        if why := paths.not_text(path):
            yield Problem(key, why, "rename the file")
        elif len(path.encode()) > _LONGEST_PATH:
            yield _problem(key, path, "exceeds the maximum length of an S3 key")


def _checked(top: Path, files: list[_Stat], known: Mapping[str, list[Any]]) -> Iterator[DataFile]:
    """The files with their checksums, which are computed for new and changed ones."""
    changed = {path for path, info in files if known.get(path, [])[:-2] != _size_and_stamp(info)}
    total, done = sum(info.st_size for path, info in files if path in changed), 0
    if changed:
        newest = max(info.st_ctime for path, info in files if path in changed)
        time.sleep(min(max(newest + _SETTLED - time.time(), 0), _SETTLED))
    for path, info in files:
        stamp = tuple(_size_and_stamp(info)[1:])
        if path not in changed:
            checksum, parts = known[path][-2:]
            yield DataFile(path, info.st_size, checksum, stamp, tuple(parts))
            continue
        checksum, parts = _read(top / path, info)
        yield DataFile(path, info.st_size, checksum, stamp, parts)
        done += info.st_size
        if progress.show is not None:
            progress.show("reading data", done, total)


def _size_and_stamp(info: os.stat_result) -> list[int]:
    return [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]


def is_unchanged(top: Path, file: DataFile) -> bool:
    """Whether a file, by its size and times, is still the one that was scanned."""
    try:
        return _size_and_stamp((top / file.path).stat()) == [file.size, *file.stamp]
    except OSError:
        return False


def changed(path: Path | str) -> TryAgain:
    """The error for data that changed while a job was prepared or sent."""
    return TryAgain(
        f"{path} changed while the data was being read or uploaded",
        hint="submit again when no program is writing to the data folder",
    )


def _read(path: Path, info: os.stat_result) -> tuple[str, tuple[str, ...]]:
    """The checksum of a file, and those of its parts."""
    try:
        with io.BufferedReader(paths.open_regular(path, follow=True)) as file:
            checksums = _checksums(file, info.st_size)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise changed(path) from error
    if _size_and_stamp(after) != _size_and_stamp(info):
        raise changed(path)
    return checksums


def part_size(size: int) -> int:
    """Bytes of a part of a file of this size, as boto3 chooses them."""
    part = PART
    while size > part * _MAX_PARTS:
        part *= 2
    return part


def _checksums(file: IO[bytes], size: int) -> tuple[str, tuple[str, ...]]:
    """The checksum that S3 stores for a file that boto3 uploads, and those of its parts."""
    part, digests = part_size(size), list[bytes]()
    for _ in range(0, max(size, 1), part):
        digest = hashlib.sha256()
        for _ in range(0, part, _BLOCK):
            digest.update(file.read(_BLOCK))
        digests.append(digest.digest())
    if size < PART:
        return as_base64(digests[0]), ()
    whole = as_base64(hashlib.sha256(b"".join(digests)).digest())
    return f"{whole}-{len(digests)}", tuple(map(as_base64, digests))


def as_base64(digest: bytes) -> str:
    """Return a digest as S3 writes checksums."""
    return base64.b64encode(digest).decode()
