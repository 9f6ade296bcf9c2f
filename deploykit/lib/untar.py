"""Unpack tar archives from elsewhere: no member may leave the folder, or be a device.

Python's own filter for data does that (PEP 706). Debian 12's Python 3.11.2 does not have it yet.
"""

from __future__ import annotations

import copy
import os
import tarfile
from pathlib import Path
from typing import Any

_HAS_FILTERS = hasattr(tarfile, "data_filter")
_AS_CHECKED: Any = {"filter": "fully_trusted"} if _HAS_FILTERS else {}


class UnsafeMemberError(tarfile.TarError):
    """A member would leave the folder, or is a device."""


def extract_all(archive: tarfile.TarFile, folder: Path, *, skip_unsafe: bool = False) -> None:
    """Unpack an archive. Raises UnsafeMemberError, unless such members are skipped."""
    for member in archive:
        try:
            harmless = checked(member, folder)
        except UnsafeMemberError:
            if skip_unsafe:
                continue
            raise
        archive.extract(harmless, folder, **_AS_CHECKED)


def checked(member: tarfile.TarInfo, folder: Path) -> tarfile.TarInfo:
    """The member as it may be written below `folder`. Raises UnsafeMemberError."""
    if not _HAS_FILTERS:
        return _checked(member, str(folder))
    try:
        return tarfile.data_filter(member, str(folder))
    except tarfile.FilterError as error:
        raise UnsafeMemberError(str(error)) from error


def _checked(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """What the data filter does. The owner is whoever unpacks, and others cannot write."""
    path = os.path.join(folder, member.name)  # noqa: PTH118 - as the archive writes it
    leads_to = [path]
    if member.issym():
        leads_to.append(os.path.join(os.path.dirname(path), member.linkname))  # noqa: PTH118, PTH120
    elif member.islnk():
        leads_to.append(os.path.join(folder, member.linkname))  # noqa: PTH118
    elif not (member.isreg() or member.isdir()):
        raise UnsafeMemberError(f"{member.name!r} is neither a file nor a folder")
    names = member.name, member.linkname
    if any(map(os.path.isabs, names)) or not all(_is_below(each, folder) for each in leads_to):
        raise UnsafeMemberError(f"{member.name!r} would be written outside the folder")
    harmless = copy.copy(member)
    harmless.uid, harmless.gid, harmless.uname, harmless.gname = os.getuid(), os.getgid(), "", ""
    harmless.mode = 0o755 if member.isdir() else member.mode & 0o755 | 0o600
    return harmless


def _is_below(path: str, folder: str) -> bool:
    root = os.path.realpath(folder)
    return os.path.commonpath([root, os.path.realpath(path)]) == root
