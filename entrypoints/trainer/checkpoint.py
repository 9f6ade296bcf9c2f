"""Checkpoints that are whole or not there: ``step-00000120.pt`` in the checkpoint folder."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

KEEP = 2
"""Checkpoints that stay; older ones are removed after each save."""


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write `state`, so that a reader sees either all of it under its name or nothing.

    A kill at any moment leaves at worst a `saving.tmp`, which the next save overwrites.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "saving.tmp"
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    path = folder / f"step-{step:08d}.pt"
    temporary.replace(path)
    _sync(folder)
    for old in _newest_first(folder)[KEEP:]:
        old.unlink()
    return path


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that can be read, or None. A broken one is named and passed over."""
    for path in _newest_first(folder):
        try:
            return path, torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            print(f"{path} cannot be read, trying the one before: {error}", flush=True)
    return None


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"), reverse=True)


def _sync(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
