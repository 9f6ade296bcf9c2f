"""Finding the job of a run again: by what it left in the run folder, else by its name in Slurm."""

from __future__ import annotations

import os
import re
from pathlib import Path

from deploykit.backends.slurm import array_record, client, states
from deploykit.job.decode import whole
from deploykit.job.model import Handle
from deploykit.lib import paths
from deploykit.lib.errors import BackendUnavailable


def find(run: str, folder: Path, target: str) -> Handle | None:
    """Find the run's job: the one that started first, else the one with the lowest id.

    Returns None where no job was queued, which includes a job that Slurm no longer knows and that
    never started. Raises BackendUnavailable when this cannot be determined.
    """
    from deploykit.backends.slurm import remote  # only a submit that was interrupted needs it

    remote_folder = remote.recorded_folder(folder)
    if remote_folder is None and target != client.LOCALHOST:
        if not folder.exists():
            raise BackendUnavailable(f"{folder}, which recorded the login node, was deleted")
        return None  # the submit was interrupted before anything was copied
    host = None if remote_folder is None else remote_folder.host
    if (problem := wrong_cluster(folder, host)) is not None:
        raise BackendUnavailable(problem, hint="run this command on a machine of that cluster")
    if remote_folder is None:
        job = claimed_by(folder) or client.job_id(folder) or _find_in_array(folder)
        job = job or find_by_name(run, None, f"{folder}/source")
    else:
        job = remote.find_job(remote_folder)
        job = job or find_by_name(run, host, f"{remote_folder.folder}/source")
    return None if job is None else Handle("slurm", target, job, run, str(folder))


def _find_in_array(folder: Path) -> str | None:
    """The id of the run's task, where its array was queued and the submit was interrupted then."""
    known, name = array_record.read(folder), array_record.name(folder)
    if known is None or name is None:
        return None
    job = find_by_name(name, None, str(known[0]))
    if job is not None:
        paths.write(known[0] / "job", job + "\n")  # for the other runs
    return array_record.job_id(folder)


def find_by_name(name: str, host: str | None, folder: str) -> str | None:
    """The lowest id of the jobs with that name and working folder, as squeue lists them."""
    rows = states.parse_squeue(client.output(states.squeue_argv(name), host))
    mine = (row for row in rows if (row.name, row.folder) == (name, folder))
    ids = (row.id for row in mine if not states.was_rejected(row))
    numbers = [whole(job.partition("_")[0]) for job in ids]
    first = min((number for number in numbers if number is not None), default=None)
    return None if first is None else str(first)


def wrong_cluster(folder: Path, host: str | None) -> str | None:
    """A sentence if commands talk to another cluster than the run's, or to none; else None."""
    expected = client.text_of(folder / "cluster") or array_record.cluster(folder)
    if expected is None:
        return None
    try:
        actual = client.cluster_name(host)
    except BackendUnavailable as error:
        return str(error)
    if expected == actual:
        return None
    return f"the run was submitted to the Slurm cluster {expected!r}, and this is {actual!r}"


def claimed_by(folder: Path) -> str | None:
    """The id of the job that started the run; None before any of its jobs has started."""
    try:
        claim = os.readlink(folder / "claim")  # noqa: PTH115 - the target is an id, not a path
    except OSError:
        return None
    return claim if re.fullmatch(r"[0-9]{1,18}(_[0-9]{1,9})?", claim) else None
