"""What travels with a job: a reproducible archive of the source folder, named by its content.

The same tree gives the same hash, whatever the clock, the user or the order of the directory.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from deploykit import contract, paths, private
from deploykit.errors import JobFileError, TryAgain
from deploykit.ignore import Rules
from deploykit.model import Problem

_KEY = b"-----BEGIN "
_KEY_END = b"PRIVATE KEY-----"


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


@dataclass(frozen=True)
class Bundle:
    """A source tree as it was when `scan` read it. `hash` is the SHA-256 of its tar stream."""

    source: Path
    entries: tuple[Entry, ...]
    hash: str
    commit: str | None = None
    kept_back: tuple[str, ...] = ()
    """Files that stay behind because they look like secrets."""

    @property
    def size(self) -> int:
        """Bytes of all files, uncompressed."""
        return sum(entry.size for entry in self.entries)

    def store(self) -> Path:
        """Write the archive below the state folder, unless it is there, and return its path.

        One whose content is not what its name says is written again. Raises TryAgain when the
        source has changed since it was scanned.
        """
        folder = private.folder(paths.bundles())
        path = folder / f"{self.hash}.tar.gz"
        if private.is_mine(path) and _holds(path, self.hash):
            return path
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # goes whatever happens
            written = Path(scratch, path.name)
            with open(written, "wb", opener=private.opener) as file:
                digest = _archive(self.source, self.entries, file)
            if digest != self.hash:
                what = f"{self.source} changed while it was being bundled"
                raise TryAgain(what, hint="submit again")
            written.replace(path)
        return path


def scan(source: Path, limit: int) -> Bundle:
    """Read `source` as it would travel; `limit` in bytes. Writes nothing.

    Raises JobFileError with every link that leaves the tree, every special file, every file that
    cannot be read, and a bundle larger than `limit`.
    """
    problems: list[Problem] = []
    entries, kept_back = [], []
    for entry in _walk(source, problems):
        if _is_key(source, entry):
            kept_back.append(entry.path)
        else:
            entries.append(entry)
    problems += _too_large(entries, limit)
    if problems:
        raise JobFileError(f"the source folder {source}", problems)
    for path, content in contract.node_plane().items():
        entries.append(Entry(path, size=len(content), content=content))
    entries.append(_listing(entries))
    entries.sort(key=lambda entry: entry.path)
    return Bundle(
        source, tuple(entries), _archive(source, entries), commit(source), tuple(kept_back)
    )


def _listing(entries: list[Entry]) -> Entry:
    """The names of all other files and links, for a node that looks whether it has them all.

    With them it can hash what it has unpacked: what is not in the list came later.
    """
    listed = {entry.path: entry.target or [entry.mode, entry.size] for entry in entries}
    content = json.dumps(listed, sort_keys=True).encode()
    return Entry(contract.FILES, size=len(content), content=content)


def _holds(archive: Path, digest: str) -> bool:
    """Whether this is an archive of the bundle `digest`: anybody can give a file that name."""
    if not archive.is_file():
        return False
    try:
        with gzip.open(archive) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == digest
    except (OSError, EOFError, zlib.error):
        return False


def unpack(archive: Path, target: Path) -> None:
    """Unpack a stored archive into `target`, which may exist, for its owner alone.

    Links are kept, and what the owner may do with a file.
    """
    private.folder(target)
    with tarfile.open(archive, "r:gz") as tar:
        tar.extractall(target, filter=_for_owner)  # noqa: S202 - on top of tarfile's own filter


def _for_owner(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo:
    safe = tarfile.data_filter(member, target)
    private.make(Path(target, safe.name).parent)
    return safe if safe.mode is None else safe.replace(mode=safe.mode & 0o700, deep=False)


def commit(source: Path) -> str | None:
    """The git commit that is checked out at `source`, read without git; None where unknown."""
    for folder in (source, *source.parents):
        git = folder / ".git"
        if git.is_file():
            git = folder / git.read_text().removeprefix("gitdir:").strip()
        if git.is_dir():
            return _head(git)
    return None


def _head(git: Path) -> str | None:
    common = git / "commondir"
    shared = git / common.read_text().strip() if common.exists() else git
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (shared / name).exists():
            return (shared / name).read_text().strip()
        packed = (shared / "packed-refs").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)


def _walk(source: Path, problems: list[Problem]) -> Iterator[Entry]:
    """Every file and link below `source` that is not ignored; what cannot travel is a problem."""
    rules = Rules(source)
    top = source.resolve()
    folders = [""]
    while folders:
        folder = folders.pop()
        rules.enter(folder)
        try:
            found = sorted(os.scandir(source / folder), key=lambda item: item.name)
        except OSError as error:
            problems.append(_problem(folder or ".", f"cannot be read: {error.strerror}"))
            continue
        for item in found:
            path = f"{folder}{item.name}"
            is_folder = item.is_dir(follow_symlinks=False)
            if rules.ignored(path, is_folder=is_folder) or _is_state(item):
                continue
            if is_folder:
                folders.append(f"{path}/")
            elif (problem := _why_not(item, path, top)) is not None:
                problems.append(problem)
            else:
                yield _entry(item, path)


def _is_state(item: os.DirEntry[str]) -> bool:
    """Whether this is deploykit's own folder, which may lie inside a source folder."""
    return os.path.abspath(item.path) == str(paths.state())  # noqa: PTH100 - keeps links


def _entry(item: os.DirEntry[str], path: str) -> Entry:
    if item.is_symlink():
        return Entry(path, 0o777, target=str(Path(item.path).readlink()))
    info = item.stat(follow_symlinks=False)
    executable = bool(info.st_mode & stat.S_IXUSR)
    return Entry(path, 0o755 if executable else 0o644, info.st_size)


def _why_not(item: os.DirEntry[str], path: str, top: Path) -> Problem | None:
    if item.is_symlink():
        target = Path(item.path).readlink()
        if target.is_absolute() or not _real(item.path).is_relative_to(top):
            return _problem(path, f"is a link that leaves the source folder, to {target}")
    elif not item.is_file(follow_symlinks=False):
        return _problem(path, "is neither a file, a folder nor a link")
    elif not os.access(item.path, os.R_OK):
        return _problem(path, "cannot be read")
    return None


def _real(link: str) -> Path:
    return Path(os.path.realpath(link))  # Path.resolve() raises on a loop of links


def _problem(path: str, what: str) -> Problem:
    return Problem("source", f"{path} {what}", "name it in .deploykitignore, or replace it")


def _is_key(source: Path, entry: Entry) -> bool:
    if entry.target is not None or not 0 < entry.size < 1 << 16:
        return False
    with (source / entry.path).open("rb") as file:
        first = file.readline(128)
    return first.startswith(_KEY) and _KEY_END in first


def _too_large(entries: list[Entry], limit: int) -> Iterator[Problem]:
    total = sum(entry.size for entry in entries)
    if total <= limit:
        return
    largest = sorted(entries, key=lambda entry: -entry.size)[:5]
    listing = ", ".join(f"{entry.path} ({_readable(entry.size)})" for entry in largest)
    yield Problem(
        "max_bundle",
        f"the source folder holds {_readable(total)}, more than the {_readable(limit)} allowed",
        f"name what the job does not need in .deploykitignore, or raise max_bundle; "
        f"largest: {listing}",
    )


def _readable(size: float) -> str:
    """A number of bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:  # noqa: PLR2004 - the step between two units
            return f"{size:.1f} {unit}".replace(".0 B", " B")
        size /= 1000
    return f"{size:.1f} GB"


def _archive(source: Path, entries: tuple[Entry, ...] | list[Entry], out: Any = None) -> str:
    """Write the tar stream, gzipped, to `out` (None: nowhere); its SHA-256 before compression."""
    digest = hashlib.sha256()
    zipped = gzip.GzipFile("", "wb", 6, out, mtime=0) if out is not None else None
    sink = cast("IO[bytes]", _Tee(digest, zipped))
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.mode, info.size = entry.mode, entry.size
            if entry.target is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
                tar.addfile(info)
                continue
            with _open(source, entry) as file:
                tar.addfile(info, file)
    if zipped is not None:
        zipped.close()
    return digest.hexdigest()


def _open(source: Path, entry: Entry) -> IO[bytes]:
    if entry.content is not None:
        return io.BytesIO(entry.content)
    return (source / entry.path).open("rb")


class _Tee:
    """A file that hashes what is written to it and passes it on."""

    def __init__(self, digest: Any, out: gzip.GzipFile | None) -> None:
        self._digest, self._out = digest, out

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        if self._out is not None:
            self._out.write(data)
        return len(data)
