"""The bundle of a job: a reproducible archive of the source folder, named by its content.

The same tree gives the same hash, whatever the time, the user or the order of directory entries.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from deploykit.bundle import node_plane, revision, secret_scan
from deploykit.bundle.source_tree import (
    changed,
    is_lfs_pointer,
    lfs_warning,
    opened,
    rules_of,
    walk,
)
from deploykit.job.model import Bundle, Entry, Problem
from deploykit.lib import paths, progress, shell, units
from deploykit.lib.errors import CannotWrite, JobFileError

_UNPACK_TIMEOUT = 3600
_FILES_IN_HINT = 5
_checked: dict[Path, tuple[int, ...]] = {}
"""The `_stat` of each archive that this process has stored: a sweep sends one again and again."""


def scan(source: Path, limit: int) -> Bundle:
    """Read `source` as it would be bundled; `limit` in bytes. Writes nothing.

    Raises JobFileError with every link that leaves the tree, every special file, every file that
    cannot be read, and a bundle larger than `limit`; TryAgain when a file changes
    while it is read.
    """
    problems: list[Problem] = []
    rules = rules_of(source)
    files = sorted(walk(source, rules, problems), key=lambda entry: entry.path)
    problems += _too_large(files, limit)
    if any(problem.severity == "error" for problem in problems):
        raise JobFileError(f"the source folder {source}", problems)
    secrets: dict[str, list[secret_scan.Secret]] = {}
    pointers: list[str] = []
    for entry in files:
        if entry.target is None and not rules.wanted(entry.path):
            with opened(source, entry) as file:
                if is_lfs_pointer(file, entry):
                    pointers.append(entry.path)
                if of_file := secret_scan.find(file):
                    secrets[entry.path] = of_file
    problems += [lfs_warning(pointers)] if pointers else []
    left_out = [path for path, of_file in secrets.items() if secret_scan.has_key(of_file)]
    travel = [entry for entry in files if entry.path not in left_out]
    for path, content in node_plane.node_plane().items():
        travel.append(Entry(path, size=len(content), content=content))
    travel.sort(key=lambda entry: entry.path)
    travel.append(node_plane.file_list(travel))
    return Bundle(
        source,
        tuple(travel),
        _write(source, travel, "reading"),
        revision.commit(source),
        tuple(left_out),
        (*problems, *secret_scan.warnings(secrets, left_out)),
    )


def _too_large(entries: list[Entry], limit: int) -> Iterator[Problem]:
    total = sum(entry.size for entry in entries)
    if total <= limit:
        return
    largest = sorted(entries, key=lambda entry: -entry.size)[:_FILES_IN_HINT]
    listing = ", ".join(f"{entry.path} ({units.size(entry.size)})" for entry in largest)
    yield Problem(
        "max_bundle",
        f"the source folder is {units.size(total)}, larger than the limit of {units.size(limit)}",
        f"list unneeded files in .deploykitignore, or raise max_bundle; largest: {listing}",
    )


def store(bundle: Bundle) -> Path:
    """Write the archive to the state folder, unless it exists, and return its path.

    One whose content does not match its name is written again. Raises TryAgain when the source
    has changed since it was scanned.
    """
    path = _path(bundle.hash)
    if _checked.get(path) != _stat(path) and not holds(path, bundle.hash):
        folder = paths.private_folder(paths.bundles())
        with paths.scratch(folder) as scratch:
            _pack(bundle, scratch / "archive").replace(path)
    _checked[path] = _stat(path)
    return path


def _pack(bundle: Bundle, path: Path) -> Path:
    with (
        open(path, "wb", opener=paths.private_opener) as file,
        # level 6 takes twice as long, for a tenth less
        gzip.GzipFile("", "wb", 1, file, mtime=0) as compressed,
    ):
        if _write(bundle.source, bundle.entries, "packing", compressed) != bundle.hash:
            raise changed(str(bundle.source))
    return path


def _stat(archive: Path) -> tuple[int, ...]:
    """Fields that change if the archive does."""
    try:
        info = archive.lstat()
    except OSError:
        return ()
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino


def _path(digest: str) -> Path:
    return paths.bundles() / f"{digest}.tar.gz"


def kept(digest: str) -> Path | None:
    """The archive of an earlier bundle; None where it was deleted or damaged."""
    path = _path(digest)
    return path if digest and holds(path, digest) else None


def holds(archive: Path, digest: str) -> bool:
    """Whether this is an archive of the bundle `digest`: an interrupted copy has its name too."""
    if not archive.is_file():
        return False
    try:
        with gzip.open(archive) as stream:
            return hashlib.file_digest(cast(Any, stream), "sha256").hexdigest() == digest
    except (OSError, EOFError, zlib.error):
        return False


def unpack(archive: Path, target: Path) -> None:
    """Unpack a stored archive into `target`, which may exist, with access for its owner alone.

    Links and the owner's permissions are kept; all files are as old as in the archive, so what a
    program writes later is newer. Raises CannotWrite where `tar` fails, for example on a full disk.
    """
    paths.private_folder(target)
    flags = ("--no-same-owner", "--no-same-permissions")
    # in a shell, since a process has one umask for all its threads
    masked = ("sh", "-c", 'unset TAR_OPTIONS; umask 077; exec tar "$@"', "tar")
    argv = [*masked, *flags, "-xzf", str(archive.absolute()), "-C", str(target.absolute())]
    code, _, complaint = shell.run(argv, timeout=_UNPACK_TIMEOUT)
    if code:
        raise CannotWrite(
            f"cannot unpack {archive} into {target}: {complaint.strip()}",
            hint=paths.HINT,
        )


def _write(
    source: Path, entries: Sequence[Entry], what: str, out: gzip.GzipFile | None = None
) -> str:
    """Write a tar stream of the entries to `out`, if given; return its SHA-256.

    Shows its progress as `what`. Raises TryAgain where a file has become shorter or longer.
    """
    stream = _Stream(what, sum(entry.size for entry in entries), out)
    with tarfile.open(
        mode="w|", fileobj=cast(Any, stream), format=tarfile.PAX_FORMAT, encoding="utf-8"
    ) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.mode, info.size = entry.mode, entry.size
            if entry.target is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
                tar.addfile(info)
                continue
            with opened(source, entry) as file:
                try:
                    tar.addfile(info, file)
                except OSError as error:
                    if error.errno is not None:  # of the disk
                        raise
                    raise changed(entry.path) from error
                if file.read(1):
                    raise changed(entry.path)
    return stream.digest.hexdigest()


class _Stream:
    """Hashes and counts what is written to it, and passes it on."""

    def __init__(self, what: str, total: int, out: IO[bytes] | gzip.GzipFile | None) -> None:
        self.digest = hashlib.sha256()
        self._what, self._total, self._done, self._out = what, total, 0, out

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        if self._out is not None:
            self._out.write(data)
        self._done = min(self._done + len(data), self._total)
        if progress.show is not None:
            progress.show(self._what, self._done, self._total)
