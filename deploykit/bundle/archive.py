"""The bundle of a job: a reproducible archive of the source folder, named by its content.

The same tree gives the same hash, whatever the time, the user or the order of directory entries.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from deploykit.bundle import node_plane, revision, secret_scan
from deploykit.bundle.secret_scan import Scanner, Secret
from deploykit.bundle.source_tree import IgnoreRules, changed, opened, rules_of, walk
from deploykit.job.model import Bundle, Entry, Problem
from deploykit.lib import paths, progress, shell, units
from deploykit.lib.errors import CannotWrite, JobFileError
from deploykit.lib.version import __version__

_SETTLED = 3.0
"""Seconds after which a change of a file changes its times too: FAT counts in 2 s, NFS in 1 s."""
_PIECE = 1 << 20
"""Bytes that are read at once."""
_UNPACK_TIMEOUT = 3600
_checked: dict[Path, list[int]] = {}
"""The `_stat` of each archive that this process has stored."""
_FILES_IN_HINT = 5


def scan(source: Path, limit: int) -> Bundle:
    """Read `source` as it would be bundled; `limit` in bytes. Writes nothing.

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
    bundle = _unread(source, entries, state) or _read(source, entries, rules)
    return bundle._replace(warnings=(*problems, *bundle.content_warnings), state=state)


def store(bundle: Bundle) -> Path:
    """Write the archive to the state folder, unless it exists, and return its path.

    One whose content does not match its name is written again. Raises TryAgain when the source
    has changed since it was scanned.
    """
    path = _path(bundle.hash)
    is_known = _known(bundle.source, bundle.state).get("archive") == _stat(path)
    if not is_known and _checked.get(path) != _stat(path) and not holds(path, bundle.hash):
        folder = paths.private_folder(paths.bundles())
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _write(bundle, Path(scratch, "archive")).replace(path)
    _checked[path] = _stat(path)
    if bundle.state and not is_known:
        _remember(bundle, path)
    return path


def _write(bundle: Bundle, path: Path) -> Path:
    with (
        open(path, "wb", opener=paths.private_opener) as file,
        # level 6 takes twice as long, for a tenth less
        gzip.GzipFile("", "wb", 1, file, mtime=0) as compressed,
    ):
        archive = _Archive("packing", bundle.size, compressed)
        for entry in bundle.entries:
            archive.add(bundle.source, entry)
        if archive.end() != bundle.hash:
            raise changed(str(bundle.source))
    return path


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
            f"{archive} cannot be unpacked into {target}: {complaint.strip()}",
            hint=paths.HINT,
        )


# --- reading


def _read(source: Path, entries: list[Entry], rules: IgnoreRules) -> Bundle:
    """Hash the files, and search them for private keys and tokens in the same pass."""
    archive = _Archive("reading", sum(entry.size for entry in entries))
    travel: list[Entry] = []
    secrets: dict[str, list[Secret]] = {}
    left_out: list[str] = []
    for entry in entries:
        before, scanner = archive.mark(), Scanner()
        is_searched = entry.content is None and not rules.wanted(entry.path)
        archive.add(source, entry, scanner if is_searched else None)
        if scanner.secrets:
            secrets[entry.path] = scanner.secrets
        if scanner.has_key:
            archive.reset(before)
            left_out.append(entry.path)
        else:
            travel.append(entry)
    travel.append(listing := node_plane.file_list(travel))
    archive.add(source, listing)
    return Bundle(
        source,
        tuple(travel),
        archive.end(),
        revision.commit(source),
        tuple(left_out),
        content_warnings=tuple(secret_scan.warnings(secrets, left_out)),
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
        f"add what the job does not need to .deploykitignore, or raise max_bundle; "
        f"largest: {listing}",
    )


class _Mark(NamedTuple):
    """A position in an archive: the hash up to it, and its offset."""

    digest: Any
    offset: int


class _Archive:
    """A tar stream, hashed; also written to `out`, if given. Its progress is shown as `what`."""

    def __init__(self, what: str, total: int, out: IO[bytes] | gzip.GzipFile | None = None) -> None:
        self._what, self._total, self._done = what, total, 0
        self._digest = hashlib.sha256()
        self._out = out
        self._tar = tarfile.TarFile(
            mode="w",
            fileobj=cast(Any, self),
            format=tarfile.PAX_FORMAT,
            encoding="utf-8",
            copybufsize=_PIECE,
        )

    def add(self, source: Path, entry: Entry, scanner: Scanner | None = None) -> None:
        """Add an entry; its content is searched by `scanner`, if given. Raises TryAgain."""
        info = tarfile.TarInfo(entry.path)
        info.mode, info.size = entry.mode, entry.size
        if entry.target is not None:
            info.type, info.linkname = tarfile.SYMTYPE, entry.target
            self._tar.addfile(info)
            return
        with opened(source, entry) as file:
            self._tar.addfile(info, _Content(file, entry, scanner, self._count))

    def _count(self, size: int) -> None:
        self._done += size
        if progress.show is not None:
            progress.show(self._what, self._done, self._total)

    def mark(self) -> _Mark:
        """The current position, for `reset`."""
        return _Mark(self._digest.copy(), self._tar.offset)

    def reset(self, mark: _Mark) -> None:
        """Forget what was added since `mark`."""
        self._digest, self._tar.offset = mark

    def end(self) -> str:
        """Write the end of the archive; return the SHA-256 of the uncompressed stream."""
        self._tar.close()
        return self._digest.hexdigest()

    def write(self, data: bytes) -> int:
        """Take the next bytes of the stream, as a file does for `tarfile`."""
        self._digest.update(data)
        if self._out is not None:
            self._out.write(data)
        return len(data)

    def tell(self) -> int:
        """The offset at which the archive begins."""
        return 0


class _Content:
    """The content of a file for `tarfile`, of exactly the size with which the file was listed."""

    def __init__(
        self,
        file: IO[bytes],
        entry: Entry,
        scanner: Scanner | None,
        count: Callable[[int], None],
    ) -> None:
        self._file, self._path, self._scanner = file, entry.path, scanner
        self._left, self._count = entry.size, count
        if entry.size == 0:
            self._require_end()

    def read(self, size: int = -1, /) -> bytes:
        """The next `size` bytes. Raises TryAgain where the file has become shorter or longer."""
        try:
            piece = self._file.read(size)
        except OSError as error:
            raise changed(self._path) from error
        self._left -= len(piece)
        if len(piece) < size:
            raise changed(self._path)
        if self._left == 0:
            self._require_end()
        if self._scanner is not None:
            self._scanner.feed(piece, last=self._left == 0)
        self._count(size)
        return piece

    def _require_end(self) -> None:
        if self._file.read(1):
            raise changed(self._path)


# --- what is known of a source that has not changed


def _state(source: Path, entries: list[Entry], rules: IgnoreRules) -> str:
    """A hash that is the same only if all files are, by what the file system says of them.

    The time of change (ctime) cannot be set by programs. Empty where a file has changed so lately
    that another change might leave the same times. Includes this version of deploykit, since
    another one may search for other secrets.
    """
    begun, latest, digest = time.time(), 0, hashlib.sha256(__version__.encode())
    for entry in entries:
        digest.update(repr((entry[:4], rules.wanted(entry.path))).encode())
        if entry.content is not None:
            digest.update(entry.content)
            continue
        try:
            info = os.lstat(source / entry.path)
        except OSError:
            return ""  # read as it is now, with its error
        times = (info.st_mtime_ns, info.st_ctime_ns)
        digest.update(repr((*times, info.st_ino, info.st_dev, info.st_size)).encode())
        latest = max(latest, *times)
    return digest.hexdigest() if latest < (begun - _SETTLED) * 1e9 else ""


def _record_file(source: Path) -> Path:
    name = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()
    return paths.source_states() / f"{name}.json"


def _known(source: Path, state: str) -> dict[str, Any]:
    """What was found when the source was in this state; empty if it was in another."""
    if not state:  # it has just changed
        return {}
    try:
        known = json.loads(_record_file(source).read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) and known.get("state") == state else {}


def _unread(source: Path, entries: list[Entry], state: str) -> Bundle | None:
    """The bundle of a source that has not changed since; None where it must be read."""
    known = _known(source, state)
    if not known:
        return None
    travel = [entry for entry in entries if entry.path not in known["kept_back"]]
    return Bundle(
        source,
        (*travel, node_plane.file_list(travel)),
        known["hash"],
        revision.commit(source),
        tuple(known["kept_back"]),
        content_warnings=tuple(
            Problem("source", message, hint, severity="warning")
            for message, hint in known["warnings"]
        ),
    )


def _stat(archive: Path) -> list[int]:
    """What changes with the archive; only zeros where there is none."""
    try:
        info = archive.lstat()
    except OSError:
        return [0]
    return [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]


def _remember(bundle: Bundle, archive: Path) -> None:
    """Keep what is known of the source, so that the next submit need not read it."""
    record = {
        "state": bundle.state,
        "hash": bundle.hash,
        "kept_back": bundle.kept_back,
        "warnings": [[problem.message, problem.hint] for problem in bundle.content_warnings],
        "archive": _stat(archive),
    }
    file = _record_file(bundle.source)
    paths.private_folder(file.parent)
    paths.write(file, json.dumps(record))
