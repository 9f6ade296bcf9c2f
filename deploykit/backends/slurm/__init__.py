"""The Slurm backend: one batch job, with one launcher on each node.

`check` and `plan` need no Slurm. The other functions of the contract import their modules when
called, so that a dry run does not pay for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deploykit.backends.slurm.checks import check as check
from deploykit.backends.slurm.options import Options as Options
from deploykit.backends.slurm.script import plan as plan
from deploykit.model import Handle, LogLine, Plan, Status

SUMMARY = "a Slurm cluster, through sbatch; one launcher on each node"
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "srun")
MODULES = ("submitit",)


def submit(plan: Plan, folder: Path) -> Handle:
    """Submit the plan: see `submission.submit`."""
    from deploykit.backends.slurm import submission

    return submission.submit(plan, folder)


def find(run: str, folder: Path, target: str) -> Handle | None:
    """Find the run's job: see `monitor.find`."""
    from deploykit.backends.slurm import monitor

    return monitor.find(run, folder, target)


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    """Query the status of many runs: see `monitor.status`."""
    from deploykit.backends.slurm import monitor

    return monitor.status(handles)


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:
    """Read the logs of a run: see `monitor.logs`."""
    from deploykit.backends.slurm import monitor

    return monitor.logs(handle, follow=follow)


def cancel(handle: Handle) -> None:
    """Cancel a run's job: see `monitor.cancel`."""
    from deploykit.backends.slurm import monitor

    monitor.cancel(handle)
