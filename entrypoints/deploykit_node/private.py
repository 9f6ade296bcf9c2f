"""Files and folders of a run that only their owner may read or change, whatever the umask.

This is for deploykit's own files; the user's umask decides about what the program writes.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


def opener(path: str, flags: int) -> int:
    """For `open`: create the file with mode 0600."""
    return os.open(path, flags, 0o600)


def write(path: Path, text: str) -> None:
    """Write a file; a new one gets mode 0600."""
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)


def folder(path: Path) -> None:
    """Make a folder and its missing parents, each with at most its parent's permissions.

    So a folder is private inside a run folder, and follows the umask in a folder of the user's.
    """
    if not path.parent.exists():
        folder(path.parent)
    path.mkdir(mode=path.parent.stat().st_mode & 0o777 | 0o700, exist_ok=True)
