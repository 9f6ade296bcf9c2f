"""Where things are: what ships with deploykit, and what it keeps for the user."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str) -> Path:
    """`templates` or `entrypoints`: inside the package in a wheel, beside it in a checkout."""
    inside = _PACKAGE / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def state() -> Path:
    """The folder that deploykit writes to: ``$DEPLOYKIT_HOME``, else the XDG state folder.

    On Slurm the nodes must see it too, as they do where homes are on a shared file system.
    """
    chosen = os.environ.get("DEPLOYKIT_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "deploykit"


def run_folder(run: str) -> Path:
    """Everything of one run: artifact, source, logs, output, checkpoints."""
    return state() / "runs" / run


def bundles() -> Path:
    """Archives of source trees, named by their hash."""
    return state() / "bundles"
