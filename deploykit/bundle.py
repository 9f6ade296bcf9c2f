"""The bundle of a job: a reproducible archive of the source folder, named by its content.

The same tree gives the same hash, whatever the time, the user or the order of directory entries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from deploykit import backend, paths, revision
from deploykit.errors import JobFileError
from deploykit.model import Bundle, Entry, Problem
from deploykit.paths import OpenFolder
from deploykit.secret_scan import KEY, Scanner, Secret
from deploykit.source_tree import IgnoreRules, changed, opened, pieces, walk

if TYPE_CHECKING:
    from gzip import GzipFile
    from hashlib import _Hash

    Mark = tuple[_Hash, int]

_MOST_WARNINGS = 20
"""Files with tokens that are listed one by one."""
_MOST_LINES = 5
_PIECE = 1 << 20
"""Bytes that are compared at once."""


def scan(source: Path, limit: int) -> Bundle:
    """Read `source` as it would be bundled; `limit` in bytes. Writes nothing.

    Raises JobFileError with every link that leaves the tree, every special file, every file that
    cannot be read, and a bundle larger than `limit`; TryAgain when a file changes
    while it is read.
    """
    problems: list[Problem] = []
    rules = _rules(source)
    entries = list(walk(source, rules, problems))
    problems += _too_large(entries, limit)
    if any(problem.severity == "error" for problem in problems):
        raise JobFileError(f"the source folder {source}", problems)
    for path, content in backend.node_plane().items():
        entries.append(Entry(path, size=len(content), content=content))
    entries.sort(key=lambda entry: entry.path)
    bundle = _read(source, entries, rules)
    return replace(bundle, warnings=(*problems, *bundle.warnings))


def store(bundle: Bundle) -> Path:
    """Write the archive to the state folder, unless it exists, and return its path.

    One whose content does not match its name is written again. Raises TryAgain when the source
    has changed since it was scanned.
    """
    import tempfile  # not needed for a dry run

    folder = paths.private_folder(paths.bundles())
    path = folder / f"{bundle.hash}.tar.gz"
    if paths.is_own_file(path) and _holds(path, bundle.hash):
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # removed in any case
        written = Path(scratch, path.name)
        with open(written, "wb", opener=paths.private_opener) as file, _compressed(file) as packed:
            digest = _write(bundle, packed)
        if digest != bundle.hash:
            raise changed(str(bundle.source))
        written.replace(path)
    return path


def kept(digest: str) -> Path | None:
    """The archive of an earlier bundle; None where it was deleted or changed."""
    path = paths.bundles() / f"{digest}.tar.gz"
    return path if digest and paths.is_own_file(path) and _holds(path, digest) else None


def _listing(entries: list[Entry]) -> Entry:
    """The list of all other files and links, by which a node verifies what it has unpacked.

    Files that are not in the list were added later, and are not hashed.
    """
    listed = {entry.path: entry.target or [entry.mode, entry.size] for entry in entries}
    content = json.dumps(listed, sort_keys=True).encode()
    return Entry(backend.FILES, size=len(content), content=content)


def _holds(archive: Path, digest: str) -> bool:
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

    Links and the owner's permissions are kept.
    """
    paths.private_folder(target)
    with tarfile.open(archive, "r:gz") as tar:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4; the hash was checked in any case
            tar.extraction_filter = staticmethod(tarfile.data_filter)
        tar.extractall(target, members=_for_owner(tar, target))  # noqa: S202 - as just said


def unchanged(archive: Path, digest: str, top: OpenFolder) -> Iterator[str]:
    """The files and links of the bundle `digest` that are the same in `top` as in its `archive`.

    None where this is not its archive.
    """
    if not _holds(archive, digest):
        return
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            with contextlib.suppress(OSError):
                if _is_same(tar, member, top):
                    yield member.name


def _is_same(tar: tarfile.TarFile, member: tarfile.TarInfo, top: OpenFolder) -> bool:
    if member.issym():
        return top.target(member.name) == member.linkname
    with top.open(member.name) as found:
        stored = tar.extractfile(member)
        if stored is None or os.fstat(found.fileno()).st_size != member.size:
            return False
        while piece := stored.read(_PIECE):
            if found.read(len(piece)) != piece:
                return False
        return True


def _for_owner(tar: tarfile.TarFile, target: Path) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        paths.make_folder(Path(target, member.name).parent)
        member.mode &= 0o700
        yield member


def _rules(source: Path) -> IgnoreRules:
    try:
        return IgnoreRules(source)
    except OSError as error:
        problem = Problem("source", f"{error.filename} cannot be read: {error.strerror}")
        raise JobFileError(f"the source folder {source}", [problem]) from error


def _read(source: Path, entries: list[Entry], rules: IgnoreRules) -> Bundle:
    """Hash the files, and search them for private keys and tokens in the same pass."""
    archive = _Archive()
    travel: list[Entry] = []
    lines_by_file: dict[str, dict[Secret, int]] = {}
    with opened(source) as top:
        for entry in entries:
            before, scanner = archive.mark(), Scanner()
            if entry.content is None and entry.target is None and not rules.wanted(entry.path):
                archive.add(entry, scanner.watch(pieces(top, entry), entry.size))
            else:
                archive.add(entry, _content(top, entry))
            if scanner.secrets:
                lines_by_file[entry.path] = scanner.lines(pieces(top, entry))
            if scanner.private:
                archive.reset(before)
            else:
                travel.append(entry)
    names = {entry.path for entry in travel}
    travel.append(listing := _listing(travel))
    archive.add(listing, _content(top, listing))
    keys = {path: lines for path, lines in lines_by_file.items() if path not in names}
    tokens = {path: lines for path, lines in lines_by_file.items() if path in names}
    return Bundle(
        source,
        tuple(travel),
        archive.end(),
        revision.commit(source),
        tuple(keys),
        (*_key_warnings(keys), *_token_warnings(tokens)),
    )


def _write(bundle: Bundle, out: GzipFile) -> str:
    from deploykit import progress  # not needed for a dry run

    archive = _Archive(out)
    count: Callable[[Iterable[bytes]], Iterator[bytes]] = iter
    if progress.show is not None:
        count = progress.counter("packing", bundle.size, progress.show)
    with opened(bundle.source) as top:
        for entry in bundle.entries:
            archive.add(entry, count(_content(top, entry)))
    return archive.end()


def _content(top: OpenFolder, entry: Entry) -> Iterable[bytes]:
    if entry.target is not None:
        return ()
    return pieces(top, entry) if entry.content is None else (entry.content,)


def _key_warnings(lines_by_file: dict[str, dict[Secret, int]]) -> Iterator[Problem]:
    keys = [
        f"{path} (line {line})"
        for path, lines in lines_by_file.items()
        for secret, line in lines.items()
        if secret.name == KEY
    ]
    if keys:
        yield Problem(
            "source",
            f"left out, because they contain private keys: {', '.join(keys)}",
            "to include one, add it with a leading ! to .deploykitignore",
            severity="warning",
        )


def _token_warnings(lines_by_file: dict[str, dict[Secret, int]]) -> Iterator[Problem]:
    for path, lines in list(lines_by_file.items())[:_MOST_WARNINGS]:
        for name, start in dict.fromkeys((secret.name, secret.start) for secret in lines):
            numbers = sorted({line for secret, line in lines.items() if secret.name == name})
            yield Problem(
                "source",
                f"{path}, {_listed(numbers)}: looks like {name}{f' ({start}...)' if start else ''}",
                "remove it and pass it as a `secret:` of `env`; "
                f"if it is not a secret, add !/{path} to .deploykitignore",
                severity="warning",
            )
    if len(lines_by_file) > _MOST_WARNINGS:
        more = f"{len(lines_by_file) - _MOST_WARNINGS} more files seem to contain tokens"
        yield Problem("source", more, severity="warning")


def _listed(lines: list[int]) -> str:
    if len(lines) == 1:
        return f"line {lines[0]}"
    return f"lines {', '.join(map(str, lines[:_MOST_LINES]))}{', ...' * (len(lines) > _MOST_LINES)}"


def _too_large(entries: list[Entry], limit: int) -> Iterator[Problem]:
    total = sum(entry.size for entry in entries)
    if total <= limit:
        return
    largest = sorted(entries, key=lambda entry: -entry.size)[:5]
    listing = ", ".join(f"{entry.path} ({readable(entry.size)})" for entry in largest)
    yield Problem(
        "max_bundle",
        f"the source folder is {readable(total)}, larger than the limit of {readable(limit)}",
        f"add what the job does not need to .deploykitignore, or raise max_bundle; "
        f"largest: {listing}",
    )


def readable(size: float) -> str:
    """A number of bytes as text, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:  # noqa: PLR2004 - the step between two units
            return f"{size:.1f} {unit}".replace(".0 B", " B")
        size /= 1000
    return f"{size:.1f} GB"


class _Archive:
    """A tar stream without owners and times, hashed; written to `out`, if given."""

    def __init__(self, out: GzipFile | None = None) -> None:
        self._digest = hashlib.sha256()
        self._size = 0
        self._out = out

    def add(self, entry: Entry, content: Iterable[bytes]) -> None:
        """Add an entry with its content, of exactly `entry.size` bytes."""
        self._write(_header(entry))
        for piece in content:
            self._write(piece)
        self._write(b"\0" * (-entry.size % tarfile.BLOCKSIZE))

    def mark(self) -> Mark:
        """The current position, for `reset`."""
        return self._digest.copy(), self._size

    def reset(self, mark: Mark) -> None:
        """Discard what was added since `mark`; only where nothing is written."""
        self._digest, self._size = mark

    def end(self) -> str:
        """Write the end of the archive; return the SHA-256 of the uncompressed stream."""
        end = 2 * tarfile.BLOCKSIZE
        self._write(b"\0" * (end + -(self._size + end) % tarfile.RECORDSIZE))
        return self._digest.hexdigest()

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._size += len(data)
        if self._out is not None:
            self._out.write(data)


def _compressed(out: IO[bytes]) -> GzipFile:
    import gzip  # not needed for a dry run

    return gzip.GzipFile("", "wb", 6, out, mtime=0)


def _header(entry: Entry) -> bytes:
    info = tarfile.TarInfo(entry.path)
    info.mode, info.size = entry.mode, entry.size
    if entry.target is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
