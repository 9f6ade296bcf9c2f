"""Whether the source on this machine is the one that was planned: its hash, computed once more.

``DEPLOYKIT_BUNDLE`` is the SHA-256 of the bundle's tar stream; `deploykit/bundle.py` writes that
stream. ``files.json`` lists the bundle's files, so what came later (caches, what an installation
left) does not count.

It finds an archive that was mixed up, or changed without thought of this check. Whoever can change
the archive can change this file too, so it is no defence against them; docs/how-to/sagemaker.md
says what is.
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

from cluster import BadEnvironment

VARIABLE = "DEPLOYKIT_BUNDLE"
_LIST = ".deploykit/files.json"
_SHOWN = 5
_KEY = 32
"""Bytes of the key that the machines share."""


def check(env: dict[str, str]) -> bytes:
    """Take the planned hash out of `env`, and compare the source folder with it.

    Once on each machine, before any rank's program has started: it may change its own folder.
    Returns a key that is alike on all machines and known to those alone who can read the source;
    nothing where no hash was planned. Raises BadEnvironment with the files that differ.
    """
    planned = env.pop(VARIABLE, None)
    if planned is None:
        return b""
    folder = Path(__file__).resolve().parent.parent
    note = _note(f"{env.get('DEPLOYKIT_RUN')} {folder} {planned}")
    try:
        fcntl.flock(note, fcntl.LOCK_EX)  # the other ranks wait here
        key = os.read(note, _KEY)
        if len(key) != _KEY:
            key = _compare(folder, planned)
            os.pwrite(note, key, 0)
        return key
    finally:
        os.close(note)


def _note(what: str) -> int:
    """A file of ours, outside the source, that holds the key once the source was checked."""
    digest = hashlib.sha256(what.encode()).hexdigest()
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path = Path(tempfile.gettempdir(), f"deploykit-{os.getuid()}-{digest[:32]}")
        note = os.open(path, flags, 0o600)
    except OSError as error:
        raise BadEnvironment(
            f"No file can be made in the folder for temporary ones: {error}."
        ) from None
    if os.fstat(note).st_uid != os.getuid():
        raise BadEnvironment(f"{path} belongs to another user; remove it.")
    return note


def _compare(folder: Path, planned: str) -> bytes:
    try:
        listed = dict(json.loads((folder / _LIST).read_bytes()))
        changed = [name for name, about in listed.items() if _differs(folder / name, about)]
        found, key = ("", b"") if changed else digest(folder, [*sorted(listed), _LIST])
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise BadEnvironment(_sentence(planned, f"{_LIST} cannot be used ({error})")) from None
    if changed:
        more = ", ..." if len(changed) > _SHOWN else ""
        raise BadEnvironment(_sentence(planned, ", ".join(map(ascii, changed[:_SHOWN])) + more))
    if found != planned:
        raise BadEnvironment(_sentence(planned, f"its SHA-256 is {found}"))
    return key


def _sentence(planned: str, what: str) -> str:
    return (
        f"The source in this container is not the one that was submitted ({planned}): {what}. "
        "The program was not started. See who may write to the bucket, and submit again. A file "
        "that an installation rewrites before the start belongs into .deploykitignore."
    )


def _differs(path: Path, about: Any) -> bool:
    """Whether a file's kind, mode or size, or a link's target, is not as listed."""
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
    """SHA-256 of the tar stream of these files and links, in this order; and a key.

    The hash stands in plans and requests. Nobody can compute the key from it.
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
        found, info = (folder / name).lstat(), tarfile.TarInfo(name)
        if stat.S_ISLNK(found.st_mode):
            info.mode, info.type = 0o777, tarfile.SYMTYPE
            info.linkname = str((folder / name).readlink())
        else:
            info.mode, info.size = _mode(found), found.st_size
        yield name, info


class _Hashing:
    """A file that hashes what is written to it."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()
        self.key = hashlib.blake2b(digest_size=_KEY, person=b"deploykit nodes")

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.key.update(data)
        return len(data)
