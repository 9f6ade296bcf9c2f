"""Check that the source on this machine is the planned one, by computing its hash again.

``DEPLOYKIT_BUNDLE`` is the SHA-256 of the bundle's tar stream (`deploykit/bundle/archive.py`).
``files.json`` lists the bundle's files, so files added later (caches, build outputs) do not count.

The check finds an archive that was mixed up, or changed by a program that does not know of the
check. It is no defense against an attacker, who can change this file as well as the rest of the
archive; docs/how-to/sagemaker.md says what is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from deploykit_node.cluster import BadEnvironment

VARIABLE = "DEPLOYKIT_BUNDLE"
"""The planned hash."""
_LIST = ".deploykit/files.json"
_SHOWN = 5
_KEY = 32
"""Bytes of the key that the machines share."""
_SOURCE = Path(__file__).resolve().parents[2]
"""The unpacked source: this file is ``.deploykit/deploykit_node/source_hash.py`` in it."""


def check(env: dict[str, str]) -> bytes:
    """Take the planned hash out of `env`, and compare the source folder with it.

    The folder is compared once per machine, before any rank's program starts and may change it.
    Returns a key that is the same on all machines and known only to readers of the source; empty if
    no hash was planned. Raises BadEnvironment with the files that differ.
    """
    planned = env.pop(VARIABLE, None)
    if planned is None:
        return b""
    cache = _open_cache(f"{env.get('DEPLOYKIT_RUN')} {_SOURCE} {planned}")
    try:
        fcntl.flock(cache, fcntl.LOCK_EX)  # the other ranks wait here
        key = os.read(cache, _KEY)
        if len(key) != _KEY:
            key = _compare(_SOURCE, planned)
            os.pwrite(cache, key, 0)
        return key
    finally:
        os.close(cache)


def _open_cache(name: str) -> int:
    """A private file of this container that holds the key once the source has been checked."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    path = Path(tempfile.gettempdir(), f"deploykit-{digest[:32]}")
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadEnvironment(f"A temporary file cannot be created: {error}.") from None


def _compare(folder: Path, planned: str) -> bytes:
    try:
        listed = dict(json.loads((folder / _LIST).read_bytes()))
        changed = [name for name, about in listed.items() if _differs(folder / name, about)]
        actual, key = ("", b"") if changed else digest(folder, [*sorted(listed), _LIST])
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise BadEnvironment(_sentence(planned, f"{_LIST} cannot be used ({error})")) from None
    if changed:
        more = ", ..." if len(changed) > _SHOWN else ""
        raise BadEnvironment(_sentence(planned, ", ".join(map(ascii, changed[:_SHOWN])) + more))
    if actual != planned:
        raise BadEnvironment(_sentence(planned, f"its SHA-256 is {actual}"))
    return key


def _sentence(planned: str, what: str) -> str:
    return (
        f"The source in this container is not the one that was submitted ({planned}): {what}. The "
        "program was not started. Check who can write to the bucket, and submit again. If an "
        "installation step rewrites a file before the program starts, add that file to "
        ".deploykitignore."
    )


def _differs(path: Path, about: Any) -> bool:
    """Whether a file's kind, mode or size, or a link's target, differs from the list."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return True
    if isinstance(about, str):
        return not stat.S_ISLNK(info.st_mode) or str(path.readlink()) != about
    return not stat.S_ISREG(info.st_mode) or about != [_mode(info), info.st_size]


def _mode(info: os.stat_result) -> int:
    return 0o755 if info.st_mode & stat.S_IXUSR else 0o644


def digest(folder: Path, names: list[str]) -> tuple[str, bytes]:
    """The SHA-256 of the tar stream of these files and links in this order, and a secret key.

    Plans and requests contain the hash; the key cannot be computed from it.
    """
    sink = _Hashing()
    with tarfile.open(fileobj=cast(Any, sink), mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, info in _members(folder, names):
            if info.type == tarfile.SYMTYPE:
                tar.addfile(info)
                continue
            with (folder / name).open("rb") as file:
                tar.addfile(info, file)
    return sink.sha256.hexdigest(), sink.key.digest()


def _members(folder: Path, names: list[str]) -> Iterator[tuple[str, tarfile.TarInfo]]:
    for name in names:
        status, info = (folder / name).lstat(), tarfile.TarInfo(name)
        if stat.S_ISLNK(status.st_mode):
            info.mode, info.type = 0o777, tarfile.SYMTYPE
            info.linkname = str((folder / name).readlink())
        else:
            info.mode, info.size = _mode(status), status.st_size
        yield name, info


class _Hashing:
    """A writable file that hashes its content."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()
        self.key = hashlib.blake2b(digest_size=_KEY, person=b"deploykit nodes")

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.key.update(data)
        return len(data)
