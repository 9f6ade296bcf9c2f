"""Files and folders of a run that nobody else may read or change, whatever the umask.

Only deploykit's own: what the program writes has the modes that the user's umask gives it.
"""

from __future__ import annotations

import os
from pathlib import Path


def opener(path: str, flags: int) -> int:
    """For `open`: what it makes is the owner's alone."""
    return os.open(path, flags, 0o600)


def write(path: Path, text: str) -> None:
    """Write a file."""
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)


def folder(path: Path) -> None:
    """Make a folder, and what is missing above it, each no wider than the one that it is in.

    So it is closed in a run's folder, and in a place of the user's as the umask has it.
    """
    if not path.parent.exists():
        folder(path.parent)
    path.mkdir(mode=path.parent.stat().st_mode & 0o777 | 0o700, exist_ok=True)
