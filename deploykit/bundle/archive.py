"""The bundle of a job: a reproducible archive of the source folder, named by its content.

The same tree gives the same hash, whatever the time, the user or the order of directory entries.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from deploykit.bundle import node_plane, revision
from deploykit.bundle.secret_scan import Scanner, Secret, found_in
from deploykit.bundle.source_tree import IgnoreRules, changed, opened, pieces, rules_of, walk
from deploykit.job import decode
from deploykit.job.model import Bundle, Entry, Problem
from deploykit.lib import paths, progress, shell, units
from deploykit.lib.errors import CannotWrite, JobFileError
from deploykit.lib.paths import OpenFolder
from deploykit.lib.version import __version__

if TYPE_CHECKING:
    from gzip import GzipFile
    from hashlib import _Hash

    Mark = tuple[_Hash, int]

_SETTLED = 3.0
"""Seconds after which a change of a file changes its times too: FAT counts in 2 s, NFS in 1 s."""
_LARGEST_STATE = 1 << 20
_PIECE = 1 << 20
"""Bytes that are written at once."""
_UNPACKING = 3600
"""Seconds at most for unpacking an archive."""
_BLOCK, _RECORD = 512, 10_240
"""Bytes of a block and of a record of a tar archive (tar(5))."""


def scan(source: Path, limit: int, *, pack: bool = False) -> Bundle:
    """Read `source` as it would be bundled; `limit` in bytes.

    Writes nothing, unless `pack` says that the bundle will be stored: then it is packed as it is
    read, once.

    Raises JobFileError with every link that leaves the tree, every special file, every file that
    cannot be read, and a bundle larger than `limit`; TryAgain when a file changes
    while it is read.
    """
    problems: list[Problem] = []
    rules = rules_of(source)
    entries = list(walk(source, rules, problems))
    problems += _too_large(entries, limit)
    if any(problem.severity == "error" for problem in problems):
        raise JobFileError(f"the source folder {source}", problems)
    for path, content in node_plane.node_plane().items():
        entries.append(Entry(path, size=len(content), content=content))
    entries.sort(key=lambda entry: entry.path)
    state = _state(source, entries, rules)
    bundle = _unread(source, entries, state)
    if bundle is None and not pack:
        bundle = _read(source, entries, rules, _Archive())
    elif bundle is None:
        with _scratch() as (archive, written):
            bundle = _read(source, entries, rules, archive)
            if archive.is_whole:
                bundle = bundle._replace(archive=written.replace(_path(bundle.hash)))
    return bundle._replace(warnings=(*problems, *bundle.content_warnings), state=state)


def store(bundle: Bundle) -> Path:
    """Write the archive to the state folder, unless it exists, and return its path.

    One whose content does not match its name is written again. Raises TryAgain when the source
    has changed since it was scanned.
    """
    path = _path(bundle.hash)
    if paths.is_own_file(path) and (
        bundle.archive == path or _is_known(path, bundle) or holds(path, bundle.hash)
    ):
        _remember(bundle, path)
        return path
    with _scratch() as (archive, written):
        if _write(bundle, archive) != bundle.hash:
            raise changed(str(bundle.source))
        written.replace(path)
    _remember(bundle, path)
    return path


def _path(digest: str) -> Path:
    return paths.bundles() / f"{digest}.tar.gz"


@contextlib.contextmanager
def _scratch() -> Iterator[tuple[_Archive, Path]]:
    """An archive to write, and its file, which is removed unless it was moved."""
    import tempfile  # not needed for a dry run

    with tempfile.TemporaryDirectory(dir=paths.private_folder(paths.bundles())) as folder:
        path = Path(folder, "archive")
        with (
            open(path, "wb", opener=paths.private_opener) as file,
            contextlib.closing(_Archive(file)) as archive,
        ):
            yield archive, path


def kept(digest: str) -> Path | None:
    """The archive of an earlier bundle; None where it was deleted or changed."""
    path = _path(digest)
    return path if digest and paths.is_own_file(path) and holds(path, digest) else None


def _state(source: Path, entries: list[Entry], rules: IgnoreRules) -> str:
    """A hash that is the same only if all files are, by what the file system says of them.

    The time of change (ctime) cannot be set by programs. Empty where a file has changed so lately
    that another change might leave the same times.
    """
    begun, digest, latest, top = time.time(), hashlib.sha256(), 0, os.fspath(source)
    for entry in entries:
        digest.update(repr((entry[:4], rules.wanted(entry.path))).encode())
        if entry.content is not None:
            digest.update(entry.content)
            continue
        try:
            info = os.lstat(f"{top}/{entry.path}")
        except OSError:
            return ""  # read as it is now, with its error
        times = (info.st_mtime_ns, info.st_ctime_ns)
        digest.update(repr((*times, info.st_ino, info.st_dev, info.st_size)).encode())
        latest = max(latest, *times)
    return digest.hexdigest() if latest < (begun - _SETTLED) * 1e9 else ""


def _state_file(source: Path) -> Path:
    name = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()
    return paths.source_states() / f"{name}.json"


def _remembered(source: Path, state: str) -> dict[str, Any]:
    """What was found when the source was in this state; empty if it was in another."""
    file = _state_file(source)
    if not state or not paths.is_own_file(file):
        return {}
    try:
        known = decode.from_json(paths.read_regular(file, _LARGEST_STATE))
    except (OSError, ValueError):
        return {}
    same = isinstance(known, dict) and known.get("state") == _versioned(state)
    return known if isinstance(known, dict) and same else {}


def _versioned(state: str) -> str:
    """A state as this version sees it: another one may search for other secrets."""
    return f"{__version__} {state}"


def _unread(source: Path, entries: list[Entry], state: str) -> Bundle | None:
    """The bundle of a source that has not changed since; None where it must be read."""
    match _remembered(source, state):
        case {"hash": str(digest), "kept_back": [*kept_back], "warnings": [*warnings]}:
            travel = [entry for entry in entries if entry.path not in kept_back]
            return Bundle(
                source,
                (*travel, node_plane.file_list(travel)),
                digest,
                revision.commit(source),
                tuple(map(str, kept_back)),
                content_warnings=tuple(
                    Problem("source", m, hint, severity="warning") for m, hint in warnings
                ),
            )
    return None


def _is_known(archive: Path, bundle: Bundle) -> bool:
    """Whether the archive is as this user's last `store` of the bundle has left it."""
    known = _remembered(bundle.source, bundle.state)
    return bool(known) and known.get("hash") == bundle.hash and known["archive"] == _stat(archive)


def _stat(archive: Path) -> list[int]:
    info = archive.lstat()
    return [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]


def _remember(bundle: Bundle, archive: Path) -> None:
    """Keep what is known of the source, so that the next submit need not read it."""
    if not bundle.state or _is_known(archive, bundle):
        return
    record = {
        "state": _versioned(bundle.state),
        "hash": bundle.hash,
        "kept_back": bundle.kept_back,
        "warnings": [[problem.message, problem.hint] for problem in bundle.content_warnings],
        "archive": _stat(archive),
    }
    file = _state_file(bundle.source)
    paths.private_folder(file.parent)
    paths.write(file, json.dumps(record))


def holds(archive: Path, digest: str) -> bool:
    """Whether this is an archive of the bundle `digest`: its name alone proves nothing."""
    if not archive.is_file():
        return False
    import gzip
    import zlib

    try:
        with gzip.open(archive) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == digest
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
    code, _, complaint = shell.run(argv, timeout=_UNPACKING)
    if code:
        raise CannotWrite(
            f"{archive} cannot be unpacked into {target}: {complaint.strip()}",
            hint=paths.HINT,
        )


def _read(source: Path, entries: list[Entry], rules: IgnoreRules, archive: _Archive) -> Bundle:
    """Hash the files, and search them for private keys and tokens in the same pass."""
    count = _counter(sum(entry.size for entry in entries))
    travel: list[Entry] = []
    lines_by_file: dict[str, dict[Secret, int]] = {}
    with opened(source) as top:
        for entry in entries:
            before, scanner = archive.mark(), Scanner()
            if entry.content is None and entry.target is None and not rules.wanted(entry.path):
                archive.add(entry, scanner.watch(count(pieces(top, entry)), entry.size))
            else:
                archive.add(entry, _content(top, entry))
            if scanner.secrets:
                lines_by_file[entry.path] = scanner.lines(pieces(top, entry))
            if scanner.private:
                archive.reset(before)
            else:
                travel.append(entry)
    names = {entry.path for entry in travel}
    travel.append(listing := node_plane.file_list(travel))
    archive.add(listing, _content(top, listing))
    keys = {path: lines for path, lines in lines_by_file.items() if path not in names}
    tokens = {path: lines for path, lines in lines_by_file.items() if path in names}
    return Bundle(
        source,
        tuple(travel),
        archive.end(),
        revision.commit(source),
        tuple(keys),
        content_warnings=tuple(found_in(keys, tokens)),
    )


def _write(bundle: Bundle, archive: _Archive) -> str:
    count = _counter(bundle.size)
    with opened(bundle.source) as top:
        for entry in bundle.entries:
            archive.add(entry, count(_content(top, entry)))
    return archive.end()


def _counter(total: int) -> Callable[[Iterable[bytes]], Iterator[bytes]]:
    """What the pieces of files pass, for a progress bar where there is one."""
    return iter if progress.show is None else progress.counter("packing", total, progress.show)


def _content(top: OpenFolder, entry: Entry) -> Iterable[bytes]:
    if entry.target is not None:
        return ()
    return pieces(top, entry) if entry.content is None else (entry.content,)


def _too_large(entries: list[Entry], limit: int) -> Iterator[Problem]:
    total = sum(entry.size for entry in entries)
    if total <= limit:
        return
    largest = sorted(entries, key=lambda entry: -entry.size)[:5]
    listing = ", ".join(f"{entry.path} ({units.size(entry.size)})" for entry in largest)
    yield Problem(
        "max_bundle",
        f"the source folder is {units.size(total)}, larger than the limit of {units.size(limit)}",
        f"add what the job does not need to .deploykitignore, or raise max_bundle; "
        f"largest: {listing}",
    )


class _Archive:
    """A tar stream, hashed; written to `file`, if given, compressed."""

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._digest, self._size = hashlib.sha256(), 0
        self._file = file
        self._out = None if file is None else _compressed(file)
        self.is_whole = file is not None
        """Whether the stream, and nothing else, is written to the file."""

    def add(self, entry: Entry, content: Iterable[bytes]) -> None:
        """Add an entry with its content, of exactly `entry.size` bytes."""
        rest = b"\0" * (-entry.size % _BLOCK)
        parts: Iterable[bytes] = itertools.chain((_header(entry),), content, (rest,))
        for part in (b"".join(parts),) if entry.size <= _PIECE else parts:  # each call takes time
            self._write(part)

    def mark(self) -> Mark:
        """The current position, for `reset`."""
        return self._digest.copy(), self._size

    def reset(self, mark: Mark) -> None:
        """Discard what was added since `mark`, and all of the file, as that cannot be undone."""
        self._digest, self._size = mark
        self.is_whole = False
        self.close()
        if self._file is not None:
            self._file.truncate(0)

    def end(self) -> str:
        """Write the end of the archive; return the SHA-256 of the uncompressed stream."""
        end = 2 * _BLOCK
        self._write(b"\0" * (end + -(self._size + end) % _RECORD))
        self.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """End the compressed file, whatever is in it."""
        if self._file is not None and self._out is not None:
            self._out.close()
            self._file.flush()
            self._out = None

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._size += len(data)
        if self._out is not None:
            self._out.write(data)


def _compressed(out: IO[bytes]) -> GzipFile:
    import gzip  # not needed for a dry run

    return gzip.GzipFile("", "wb", 1, out, mtime=0)  # 6 takes twice as long, for a tenth less


def _header(entry: Entry) -> bytes:
    """The header of an entry, as `tarfile` makes it; of most files from a template."""
    if not entry.path.isascii() or len(entry.path) > 100 or entry.size >= 8**11 or entry.target:  # noqa: PLR2004 - bytes of the fields
        return _header_by_tarfile(entry)
    (first, second, last), checksum = _form(entry.mode)
    name, size = entry.path.encode(), b"%011o" % entry.size
    checksum += sum(name) + sum(size)
    return b"%b%b%b\0%b%06o\0 %b" % (name.ljust(100, b"\0"), first, size, second, checksum, last)


@functools.cache
def _form(mode: int) -> tuple[tuple[bytes, bytes, bytes], int]:
    """The header of a file around name, size and checksum (tar(5)), and the checksum of these."""
    owner = b"%07o\0%07o\0%07o\0" % (mode, 0, 0)
    rest = b"0".ljust(101, b"\0") + b"ustar\x0000"  # a file, without the target of a link
    parts = owner, b"%011o\0" % 0, rest.ljust(356, b"\0")
    return parts, sum(map(sum, parts)) + 8 * ord(" ")


def _header_by_tarfile(entry: Entry) -> bytes:
    import tarfile  # most entries do without

    info = tarfile.TarInfo(entry.path)
    info.mode, info.size = entry.mode, entry.size
    if entry.target is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
