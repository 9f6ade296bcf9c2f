"""What a submit leaves in the run's folder, for whoever asks about the run later."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from deploykit import paths

_PLACE = "place.json"


@dataclass(frozen=True)
class Place:
    """Where a run was sent from, where that is another machine."""

    host: str
    folder: str
    """The run's folder there."""


def record(folder: Path, job: str) -> None:
    """Keep the id of the job that was sent."""
    paths.write(folder / "job", job + "\n")


def job(folder: Path) -> str | None:
    """The id of the job; None where none was sent."""
    try:
        return (folder / "job").read_text().strip()
    except FileNotFoundError:
        return None


def tasks(folder: Path) -> int | None:
    """The length of the array that the run is; None where it is none."""
    try:
        return int((folder / "array").read_text())
    except FileNotFoundError:
        return None


def record_tasks(folder: Path, count: int) -> None:
    """Keep the length of an array."""
    paths.write(folder / "array", f"{count}\n")


def record_place(folder: Path, place: Place) -> None:
    """Keep where the run will be sent from, before anything is sent."""
    paths.write(folder / _PLACE, json.dumps(asdict(place)) + "\n")


def place(folder: Path) -> Place | None:
    """Where the run was sent from; None where that is this machine, or nothing was sent."""
    try:
        return Place(**json.loads((folder / _PLACE).read_text()))
    except FileNotFoundError:
        return None
