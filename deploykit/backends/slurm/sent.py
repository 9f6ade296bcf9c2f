"""What a submit leaves in the run's folder, for whoever asks about the run later."""

from __future__ import annotations

from pathlib import Path


def record(folder: Path, job: str) -> None:
    """Keep the id of the job that was sent."""
    (folder / "job").write_text(job + "\n")


def job(folder: Path) -> str | None:
    """The id of the job; None where none was sent."""
    try:
        return (folder / "job").read_text().strip()
    except FileNotFoundError:
        return None
