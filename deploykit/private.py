"""Folders and files that nobody else may read or change, whatever the umask.

A state folder holds what runs as its owner: sources, scripts, pickled functions. So everything
that deploykit makes for itself is made here, as 0700 and 0600.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from deploykit import paths
from deploykit.errors import CannotWrite

_OTHERS = 0o077


def folder(path: Path) -> Path:
    """Make a folder, and each level of it below `paths.state`; one that is too wide is narrowed.

    A warning tells of that. Raises CannotWrite where it cannot be made, or belongs to somebody
    else, who could put there what runs as this user.
    """
    top = paths.state()
    levels = [level for level in path.parents if level == top or top in level.parents]
    for level in (*reversed(levels), path):
        try:
            make(level)
            _hold(level)
        except OSError as error:
            why = f"the folder {level} cannot be used: {error.strerror}"
            raise CannotWrite(why, hint=paths.HINT) from error
    return path


def is_folder(path: Path) -> bool:
    """Whether this is a folder, not a link to one, that is the user's and closed to all others."""
    try:
        info = path.lstat()
    except OSError:
        return False
    closed = info.st_uid == os.getuid() and not info.st_mode & _OTHERS
    return closed and stat.S_ISDIR(info.st_mode)


def is_mine(path: Path) -> bool:
    """Whether this is a file of the user's, which nobody else can have put there."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return info.st_uid == os.getuid() and stat.S_ISREG(info.st_mode)


def make(path: Path) -> None:
    """Make a folder and what is missing above it. What is there stays as it is."""
    if not path.parent.exists():
        make(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def write(path: Path, text: str) -> None:
    """Write a file."""
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file."""
    with open(path, "wb", opener=opener) as file:
        file.write(content)


def touch(path: Path) -> None:
    """Make an empty file, unless it exists.

    One that exists is not opened: closing it would drop the locks that SQLite holds on it in
    another thread (https://www.sqlite.org/howtocorrupt.html, 2.2).
    """
    try:
        os.close(opener(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        if path.stat().st_mode & _OTHERS:
            narrow(path)


def opener(path: str, flags: int) -> int:
    """For `open`."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_mode & _OTHERS:
        os.fchmod(descriptor, 0o600)
    return descriptor


def narrow(path: Path) -> None:
    """Take a file, which another library made, from all others."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS)


def _hold(path: Path) -> None:
    mine, info, link = os.getuid(), path.stat(), path.lstat()
    if info.st_uid != mine or link.st_uid not in (mine, 0):  # a link may be the administrator's
        owner = info.st_uid if info.st_uid != mine else link.st_uid
        raise CannotWrite(
            f"{path} belongs to another user (uid {owner}), who could change what runs as you",
            hint=paths.HINT,
        )
    if info.st_mode & _OTHERS:
        import logging  # it is seldom needed

        path.chmod(0o700)
        was = f"{path} was open to other users (mode {stat.S_IMODE(info.st_mode):04o})"
        logging.getLogger(__name__).warning("warning: %s; now it is yours alone (0700)", was)
