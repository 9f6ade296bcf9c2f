"""What a run has on record that was submitted as one task of an array of several runs.

Such an array has a folder of its own, with these files:

==================  ==============================================================
``source``          the bundle's files, which each task copies
``.deploykit``      the node plane, which all tasks share
``tasks/K``         a link to the run folder of task K
``name``            the name of the job, with which the ids of its runs begin
``cluster``, ``job``  as in a run folder
==================  ==============================================================
"""

from __future__ import annotations

from pathlib import Path

from deploykit.backends.slurm import client
from deploykit.lib import paths

_TASK = "array_task"
"""In a run folder: the array's folder and the number of the task, a line each."""


def write(run_folder: Path, array: Path, number: int) -> None:
    """Record that a run is task `number` of an array."""
    paths.write(run_folder / _TASK, f"{array}\n{number}\n")


def read(run_folder: Path) -> tuple[Path, int] | None:
    """The folder of a run's array, and the number of its task; None for other runs."""
    array, _, number = (client.text_of(run_folder / _TASK) or "").partition("\n")
    return (Path(array), int(number)) if number.isdecimal() else None


def job_id(run_folder: Path) -> str | None:
    """The id of a run's task, such as ``38_5``; None where no array of it was queued."""
    known, job = read(run_folder), _of_array(run_folder, "job")
    return f"{job}_{known[1]}" if known and job else None


def name(run_folder: Path) -> str | None:
    """The name of the job of which a run is a task; None for other runs."""
    return _of_array(run_folder, "name")


def cluster(run_folder: Path) -> str | None:
    """The cluster to which a run's array was submitted; None for other runs."""
    return _of_array(run_folder, "cluster")


def _of_array(run_folder: Path, file: str) -> str | None:
    """What a file of the run's array says; None where there is none, and for other runs."""
    known = read(run_folder)
    return (client.text_of(known[0] / file) or None) if known else None
