"""What travels with a job: a reproducible archive of the source folder, named by its content.

The same tree gives the same hash, whatever the clock, the user or the order of the directory.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from deploykit import contract, paths, revision
from deploykit.errors import JobFileError
from deploykit.model import Bundle, Entry, Problem
from deploykit.paths import OpenFolder
from deploykit.secret_scan import KEY, Finding, Scanner
from deploykit.source_tree import IgnoreRules, changed, opened, pieces, walk

if TYPE_CHECKING:
    from hashlib import _Hash

    Mark = tuple[_Hash, int]

_MOST_WARNINGS = 20
"""Files with tokens that are named one by one."""
_MOST_LINES = 5


def scan(source: Path, limit: int) -> Bundle:
    """Read `source` as it would travel; `limit` in bytes. Writes nothing.

    Raises JobFileError with every link that leaves the tree, every special file, every file that
    cannot be read, and a bundle larger than `limit`; TryAgain when a file changes meanwhile.
    """
    problems: list[Problem] = []
    rules = _rules(source)
    entries = list(walk(source, rules, problems))
    problems += _too_large(entries, limit)
    if problems:
        raise JobFileError(f"the source folder {source}", problems)
    for path, content in contract.node_plane().items():
        entries.append(Entry(path, size=len(content), content=content))
    entries.sort(key=lambda entry: entry.path)
    return _read(source, entries, rules)


def store(bundle: Bundle) -> Path:
    """Write the archive below the state folder, unless it is there, and return its path.

    One whose content is not what its name says is written again. Raises TryAgain when the source
    has changed since it was scanned.
    """
    import tempfile  # a dry run has no use for it

    folder = paths.private_folder(paths.bundles())
    path = folder / f"{bundle.hash}.tar.gz"
    if paths.is_own_file(path) and _holds(path, bundle.hash):
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # goes whatever happens
        written = Path(scratch, path.name)
        with open(written, "wb", opener=paths.private_opener) as file:
            digest = _write(bundle.source, bundle.entries, file)
        if digest != bundle.hash:
            raise changed(str(bundle.source))
        written.replace(path)
    return path


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
    paths.private_folder(target)
    with tarfile.open(archive, "r:gz") as tar:
        tar.extractall(target, filter=_for_owner)  # noqa: S202 - on top of tarfile's own filter


def _for_owner(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo:
    safe = tarfile.data_filter(member, target)
    paths.make_folder(Path(target, safe.name).parent)
    return safe if safe.mode is None else safe.replace(mode=safe.mode & 0o700, deep=False)


def _rules(source: Path) -> IgnoreRules:
    try:
        return IgnoreRules(source)
    except OSError as error:
        problem = Problem("source", f"{error.filename} cannot be read: {error.strerror}")
        raise JobFileError(f"the source folder {source}", [problem]) from error


def _read(source: Path, entries: list[Entry], rules: IgnoreRules) -> Bundle:
    """Hash what travels. The same bytes are searched for keys and tokens, and are read once."""
    archive = _Archive()
    travel: list[Entry] = []
    found: dict[str, dict[Finding, int]] = {}
    with opened(source) as top:
        for entry in entries:
            before, scanner = archive.mark(), Scanner()
            if entry.content is None and entry.target is None and not rules.wanted(entry.path):
                archive.add(entry, scanner.watch(pieces(top, entry), entry.size))
            else:
                archive.add(entry, _content(top, entry))
            if scanner.findings:
                found[entry.path] = scanner.lines(pieces(top, entry))
            if scanner.private:
                archive.reset(before)
            else:
                travel.append(entry)
    names = {entry.path for entry in travel}
    travel.append(listing := _listing(travel))
    archive.add(listing, _content(top, listing))
    keys = {path: lines for path, lines in found.items() if path not in names}
    tokens = {path: lines for path, lines in found.items() if path in names}
    return Bundle(
        source,
        tuple(travel),
        archive.close(),
        revision.commit(source),
        tuple(keys),
        (*_key_warnings(keys), *_token_warnings(tokens)),
    )


def _write(source: Path, entries: Iterable[Entry], out: IO[bytes]) -> str:
    archive = _Archive(out)
    with opened(source) as top:
        for entry in entries:
            archive.add(entry, _content(top, entry))
    return archive.close()


def _content(top: OpenFolder, entry: Entry) -> Iterable[bytes]:
    if entry.target is not None:
        return ()
    return pieces(top, entry) if entry.content is None else (entry.content,)


def _key_warnings(found: dict[str, dict[Finding, int]]) -> Iterator[Problem]:
    places = [
        f"{path} (line {line})"
        for path, lines in found.items()
        for finding, line in lines.items()
        if finding.name == KEY
    ]
    if places:
        yield Problem(
            "source",
            f"private keys stay behind: {', '.join(places)}",
            "name them with a leading ! in .deploykitignore if the job needs them",
            severity="warning",
        )


def _token_warnings(found: dict[str, dict[Finding, int]]) -> Iterator[Problem]:
    for path, lines in list(found.items())[:_MOST_WARNINGS]:
        for name, start in dict.fromkeys((finding.name, finding.start) for finding in lines):
            numbers = sorted({line for finding, line in lines.items() if finding.name == name})
            yield Problem(
                "source",
                f"{path}, {_listed(numbers)}: looks like {name}{f' ({start}...)' if start else ''}",
                "take it out and pass it as a `secret:` of `env`; "
                f"if it is none, write !/{path} into .deploykitignore",
                severity="warning",
            )
    if len(found) > _MOST_WARNINGS:
        more = f"{len(found) - _MOST_WARNINGS} more files hold what looks like tokens"
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


class _Archive:
    """Entries are added in their order; `out` is None where only the hash is wanted."""

    def __init__(self, out: IO[bytes] | None = None) -> None:
        self._digest = hashlib.sha256()
        self._size = 0
        self._out = gzip.GzipFile("", "wb", 6, out, mtime=0) if out is not None else None

    def add(self, entry: Entry, content: Iterable[bytes]) -> None:
        """An entry with its bytes, of which there are as many as it says."""
        self._write(_header(entry))
        for piece in content:
            self._write(piece)
        self._write(b"\0" * (-entry.size % tarfile.BLOCKSIZE))

    def mark(self) -> Mark:
        """Where the stream is now, for `reset`."""
        return self._digest.copy(), self._size

    def reset(self, mark: Mark) -> None:
        """Forget what was added since; only where nothing is written."""
        self._digest, self._size = mark

    def close(self) -> str:
        """Write the end of the archive; the SHA-256 of the stream before compression."""
        end = 2 * tarfile.BLOCKSIZE
        self._write(b"\0" * (end + -(self._size + end) % tarfile.RECORDSIZE))
        if self._out is not None:
            self._out.close()
        return self._digest.hexdigest()

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._size += len(data)
        if self._out is not None:
            self._out.write(data)


def _header(entry: Entry) -> bytes:
    info = tarfile.TarInfo(entry.path)
    info.mode, info.size = entry.mode, entry.size
    if entry.target is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
