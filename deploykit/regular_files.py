"""Open files below a folder, and nothing else: no link is followed, no pipe is waited for.

A source folder and its ``.git`` may be somebody else's work. A link in it could name any file of
the user, and a named pipe would hold up whoever opens it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from pathlib import Path
from typing import Self

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NotRegular(OSError):
    """It is a link, or a special file."""


class Folder:
    """A folder that stays the same one, whatever its path comes to mean while it is open."""

    def __init__(self, path: Path) -> None:
        self._top = os.open(path, _FOLDER)
        self._below: tuple[str, int] = ("", self._top)
        """The folder that was used last: files come folder by folder."""

    def close(self) -> None:
        self._forget()
        os.close(self._top)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, path: str) -> io.FileIO:
        """The regular file `path`, relative, with forward slashes.

        Raises NotRegular, or another OSError, also where a folder on the way is a link.
        """
        folder, _, name = path.rpartition("/")
        try:
            descriptor = os.open(name, _FILE, dir_fd=self._enter(folder))
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENXIO}:  # a link; a socket or device
                raise NotRegular(error.errno, "is not a regular file", path) from error
            raise
        return _checked(descriptor, path)

    def _enter(self, folder: str) -> int:
        if folder != self._below[0]:
            self._forget()
            if folder:
                self._below = (folder, self._descend(folder))
        return self._below[1]

    def _descend(self, folder: str) -> int:
        here = self._top
        for part in folder.split("/"):
            try:
                deeper = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            finally:
                if here != self._top:
                    os.close(here)
            here = deeper
        return here

    def _forget(self) -> None:
        if self._below[1] != self._top:
            os.close(self._below[1])
            self._below = ("", self._top)


def read(folder: Path, path: str, limit: int) -> bytes | None:
    """All bytes of a regular file below `folder`; None where there is none, or one too large."""
    with contextlib.suppress(OSError, ValueError), Folder(folder) as top, top.open(path) as file:
        return _all(file, limit)
    return None


def content(path: Path, limit: int) -> bytes:
    """All bytes of a regular file, which may be behind a link.

    Raises OSError, also where it is larger than `limit` bytes.
    """
    with _checked(os.open(path, _FILE & ~os.O_NOFOLLOW), str(path)) as file:
        return _all(file, limit)


def _checked(descriptor: int, path: str) -> io.FileIO:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return io.FileIO(descriptor)
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise NotRegular(errno.EINVAL, "is not a regular file", path)


def _all(file: io.FileIO, limit: int) -> bytes:
    pieces, left = [], limit
    while piece := file.read(min(left + 1, 1 << 20)):
        left -= len(piece)
        if left < 0:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        pieces.append(piece)
    return b"".join(pieces)
