"""What Slurm makes of a job's `environment` and `outputs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deploykit.backends.slurm.options import Options
from deploykit.job import environments
from deploykit.job.model import JobSpec, Problem


def problems(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Problems that can be found from here. An environment on another host cannot be examined."""
    if job.outputs and options.array is not None:
        yield Problem(
            "outputs",
            "the tasks of an array share the working folder, and each would collect all files",
            "write to DEPLOYKIT_OUTPUT_DIR, which is separate for each task",
            severity="warning",
        )
    if job.resources.min_nodes is not None and options.array is not None:
        message = "the number of nodes cannot change in the tasks of an array"
        yield Problem("resources.min_nodes", message, f"nodes: {job.resources.nodes}")
    if job.environment is None:
        return
    yield from environments.conflict(job, "slurm.python", options.python)
    if job.environment.python is not None and options.container is not None:
        yield Problem(
            f"environment.{job.environment.python[0]}",
            "is not available in slurm.container, whose image brings its own Python",
            "remove one of the two, or set slurm.python to a Python inside the image",
        )
    elif options.host is not None:
        yield from _local_folder(job, options.host)
    else:
        prepared = bool(job.environment.modules or options.modules or options.setup)
        yield from environments.problems(job.environment, prepared=prepared)


def _local_folder(job: JobSpec, host: str) -> Iterator[Problem]:
    """A relative folder became one of this machine."""
    kind, folder = (job.environment and job.environment.python) or ("", "")
    if folder.startswith("/") and Path(folder).is_relative_to(job.source):
        yield Problem(
            f"environment.{kind}",
            f"{folder} is on this machine, but the job runs on {host}",
            f"give its absolute path on {host}, or one that begins with ~/",
        )
