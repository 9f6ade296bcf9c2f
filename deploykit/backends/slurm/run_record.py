"""What a submit and the jobs themselves leave in a run's folder on this machine.

======================  ==========================================================
``remote.json``         the login node and its folder, where the run has a host
``array``               the number of tasks, where the run is a job array
``cluster``             the name of the cluster that the job was submitted to
``job``                 the id of the job
``claim``               a link whose target is the id of the job that started first
======================  ==========================================================
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from deploykit import paths
from deploykit.decode import whole

_REMOTE = "remote.json"
_ARRAY = "array"
_CLUSTER = "cluster"
_JOB = "job"


@dataclass(frozen=True)
class RemoteFolder:
    """A run's folder on a login node."""

    host: str
    folder: str


def record_remote_folder(folder: Path, remote: RemoteFolder) -> None:
    """Record where the run's folder on the login node is, before anything is copied there."""
    paths.write(folder / _REMOTE, json.dumps(asdict(remote)) + "\n")


def remote_folder(folder: Path) -> RemoteFolder | None:
    """The run's folder on its login node; None where the run has no host or was never submitted."""
    text = _text(folder / _REMOTE)
    return None if text is None else RemoteFolder(**json.loads(text))


def record_array_size(folder: Path, count: int) -> None:
    """Record the number of tasks of a job array."""
    paths.write(folder / _ARRAY, f"{count}\n")


def array_size(folder: Path) -> int | None:
    """The number of tasks of the run's job array; None where it is a single job."""
    text = _text(folder / _ARRAY)
    return None if text is None else int(text)


def record_cluster(folder: Path, name: str) -> None:
    """Record the name of the cluster that the job is submitted to."""
    paths.write(folder / _CLUSTER, name + "\n")


def cluster(folder: Path) -> str | None:
    """The name of the cluster that the job was submitted to; None where it was not recorded."""
    return _text(folder / _CLUSTER)


def record_job(folder: Path, job: str) -> None:
    """Record the id that sbatch gave the job."""
    paths.write(folder / _JOB, job + "\n")


def job_id(folder: Path) -> str | None:
    """The id that sbatch gave the job; None where no job was submitted from this machine."""
    return _text(folder / _JOB)


def claimed_by(folder: Path) -> str | None:
    """The id of the job that started the run; None before any of its jobs has started."""
    try:
        claim = os.readlink(folder / "claim")  # noqa: PTH115 - the target is an id, not a path
    except OSError:
        return None
    return claim if whole(claim) is not None else None


def _text(path: Path) -> str | None:
    """The text of a record without its line end; None where there is none."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None
