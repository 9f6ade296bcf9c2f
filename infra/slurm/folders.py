"""The private folder of a cluster, for `cluster.py`. Standard library only.

Access to munge's socket allows submitting jobs, which run as the owner of a cluster that root did
not start. Files in the folder say which processes are ended, and which plugins Slurm loads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_OTHERS, _WRITE = 0o077, 0o022


class UntrustedFolder(Exception):
    """Another user may have created the folder or files in it."""


def check(folder: Path) -> None:
    """Raise UntrustedFolder if another user may have created the folder or files in it."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise UntrustedFolder(
            f"{folder} is a link or a file, or belongs to another user; choose a folder of your own"
        )
    if info.st_mode & _WRITE and any(folder.iterdir()):
        raise UntrustedFolder(
            f"{folder} is not empty, and other users can write to it "
            f"(mode {stat.S_IMODE(info.st_mode):04o}); choose a new folder"
        )


def take(folder: Path) -> bool:
    """Create the folder or make it private; return whether others had access.

    Raises UntrustedFolder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check(folder)
    was_open = bool(folder.stat().st_mode & _OTHERS)
    if was_open:
        folder.chmod(0o700)
    return was_open


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file, which is created if missing, and never written."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: Path, data: bytes) -> None:
    """Write a private file, replacing one that may exist."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
