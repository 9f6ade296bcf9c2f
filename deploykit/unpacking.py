"""Unpacking a bundle with the fewest calls for each file.

`tarfile` makes some twenty for owners, times and links, each of which a home on NFS answers slowly.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from deploykit import paths
from deploykit.errors import UsageError

_PIECE = 1 << 20
"""Bytes that are written at once."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_NAMES = {"", ".", ".."}

Made = TypeVar("Made")


def unpack(archive: Path, target: Path) -> None:
    """Create the files and links of an archive, which are as old as in any archive.

    What a program writes later is newer. Raises UsageError for anything that `bundle` does not
    write: a path or a link that leads out of `target`, a file below a link, a device.
    """
    paths.private_folder(target)
    with tarfile.open(archive, "r:gz") as tar:
        tree = _Tree(os.fspath(target))
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None and tree.make_folder_of(member.name):
                _create(f"{target}/{member.name}", member.mode & 0o700, content.read)
            elif not (member.issym() and tree.link(member.name, member.linkname)):
                raise UsageError(
                    f"{archive} has an entry that no bundle has: {member.name!r}",
                    hint="delete the archive, and submit again",
                )


class _Tree:
    """Folders and links that were made below a folder."""

    def __init__(self, top: str) -> None:
        self._top, self._folders, self._links = top, {""}, set[str]()

    def make_folder_of(self, path: str) -> bool:
        """Make the folder of a file; False where the path or the folder is none of a bundle."""
        if not _NO_NAMES.isdisjoint(path.split("/")):
            return False
        folder = path.rpartition("/")[0]
        return folder in self._folders or self._make(folder)

    def _make(self, folder: str) -> bool:
        above = folder.rpartition("/")[0]
        if folder in self._links or not (above in self._folders or self._make(above)):
            return False
        paths.make_folder(Path(self._top, folder))
        self._folders.add(folder)
        return True

    def link(self, path: str, end: str) -> bool:
        """Make a link; False where it leads out of the top, or has the path of none of a bundle."""
        if not self.make_folder_of(path) or not _is_below(path.rpartition("/")[0], end):
            return False
        self._links.add(path)
        whole = Path(self._top, path)
        _anew(lambda: whole.symlink_to(end), whole)
        return True


def _is_below(folder: str, end: str) -> bool:
    """Whether a link in a folder leads to a path below the top."""
    path = os.path.normpath(f"{folder or '.'}/{end}")
    return not end.startswith("/") and path.split("/")[0] != ".."


def _create(path: str, mode: int, read: Callable[[int], bytes]) -> None:
    descriptor = _anew(lambda: os.open(path, _CREATE, mode), Path(path))
    try:
        while piece := read(_PIECE):
            while piece:
                piece = piece[os.write(descriptor, piece) :]
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:  # as the umask may say
            os.fchmod(descriptor, mode)
        os.utime(descriptor, (0, 0))
    finally:
        os.close(descriptor)


def _anew(make: Callable[[], Made], path: Path) -> Made:
    """Make a file or link, in place of one that an interrupted submit has left."""
    try:
        return make()
    except FileExistsError:
        path.unlink()
        return make()
