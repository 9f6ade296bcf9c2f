"""Where things are: what ships with deploykit, and what it keeps for the user."""

from __future__ import annotations

import os
from pathlib import Path

from deploykit.errors import CannotWrite

_PACKAGE = Path(__file__).resolve().parent
HINT = "set DEPLOYKIT_HOME to a folder of your own, on a disk with free space"
"""What to do where the state folder cannot be used."""


def shipped(folder: str) -> Path:
    """`templates` or `entrypoints`: inside the package in a wheel, beside it in a checkout."""
    inside = _PACKAGE / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def state() -> Path:
    """The folder that deploykit writes to: ``$DEPLOYKIT_HOME``, else the XDG state folder.

    On Slurm the nodes must see it too, as they do where homes are on a shared file system.
    """
    chosen = os.environ.get("DEPLOYKIT_HOME")
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(chosen or f"{base}/deploykit")
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:  # of such a user, or of this one, no home is known
        raise CannotWrite(f"{folder} names no folder: {error}", hint=HINT) from error


def run_folder(run: str) -> Path:
    """Everything of one run: artifact, source, logs, output, checkpoints."""
    return state() / "runs" / run


def bundles() -> Path:
    """Archives of source trees, named by their hash."""
    return state() / "bundles"
