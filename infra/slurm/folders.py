"""The folder of a cluster, for its owner alone. For `cluster.py`; standard library only.

Who reaches munge's socket may send jobs, and those of a cluster that is not root's all run as its
owner; who writes here says what is ended, and which plugins Slurm loads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_OTHERS, _WRITE = 0o077, 0o022


class NotYours(Exception):
    """Somebody else could have put things into the folder."""


def check(folder: Path) -> None:
    """Raise NotYours where others may have made the folder, or something in it."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise NotYours(f"{folder} is a link, a file or another user's: choose a folder of your own")
    if info.st_mode & _WRITE and any(folder.iterdir()):
        raise NotYours(
            f"{folder} holds files, and other users may have put them there "
            f"(mode {stat.S_IMODE(info.st_mode):04o}): choose a new folder"
        )


def take(folder: Path) -> bool:
    """Make the folder, or close it to all others; whether it was open to them."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check(folder)
    was_open = bool(folder.stat().st_mode & _OTHERS)
    if was_open:
        folder.chmod(0o700)
    return was_open


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file, which is made where it is missing, and never written."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: Path, data: bytes) -> None:
    """Write a new file in the place of one that may be there."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
