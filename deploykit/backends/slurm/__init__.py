"""The Slurm backend: one batch job, with one launcher on each node.

`check` and `plan` need no Slurm. The other functions import their modules when they are called, so
that a dry run does not pay for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.backends import base as backend
from deploykit.backends.slurm.arrays import tasks as tasks
from deploykit.backends.slurm.checks import bills as bills
from deploykit.backends.slurm.checks import check as check
from deploykit.backends.slurm.checks import check_function as check_function
from deploykit.backends.slurm.options import Options as Options
from deploykit.backends.slurm.script import plan as plan
from deploykit.job.model import Handle, JobSpec, LogLine, Plan, Status

if TYPE_CHECKING:
    from deploykit.backends.base import Profile, Start
    from deploykit.cost.estimate import Estimate
    from deploykit.lib.finding import Finding

SUMMARY = "a Slurm cluster, through sbatch; one launcher on each node"
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "srun")
MODULES = ("submitit",)
PREFLIGHT = backend.PREFLIGHT


def submit(plan: Plan, folder: Path) -> Handle:
    """Submit a run: see `sbatch.submit`."""
    from deploykit.backends.slurm import sbatch

    return sbatch.submit(plan, folder)


def find(run: str, folder: Path, target: str) -> Handle | None:
    """Find the job of a run again: see `sbatch.find`."""
    from deploykit.backends.slurm import sbatch

    return sbatch.find(run, folder, target)


def largest_array(options: Options) -> int:
    """Return how many runs fit in one job array: see `sbatch.largest_array`."""
    from deploykit.backends.slurm import sbatch

    return sbatch.largest_array(options)


def submit_array(plans: Sequence[Plan], folder: Path, name: str, at_once: int) -> Sequence[Handle]:
    """Submit runs as one job array: see `sbatch.submit_array`."""
    from deploykit.backends.slurm import sbatch

    return sbatch.submit_array(plans, folder, name, at_once)


def when(plan: Plan) -> Iterator[Start]:
    """Yield when the job would start in each partition: see `sbatch.when`."""
    from deploykit.backends.slurm import sbatch

    yield from sbatch.when(plan)


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    """Query the status of many runs: see `jobs.status`."""
    from deploykit.backends.slurm import jobs

    return jobs.status(handles)


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:
    """Read the logs of a run: see `jobs.logs`."""
    from deploykit.backends.slurm import jobs

    return jobs.logs(handle, follow=follow)


def cancel(handle: Handle) -> None:
    """Cancel a run's job: see `jobs.cancel`."""
    from deploykit.backends.slurm import jobs

    jobs.cancel(handle)


def cancel_all(handles: Sequence[Handle]) -> None:
    """Cancel many runs: see `jobs.cancel_all`."""
    from deploykit.backends.slurm import jobs

    jobs.cancel_all(handles)


def dump(handle: Handle, folder: Path, *, native: bool) -> Sequence[str]:
    """Have each node write the stacks of its ranks: see `jobs.dump`."""
    from deploykit.backends.slurm import jobs

    return jobs.dump(handle, folder, native=native)


def enter(handle: Handle, rank: int, command: Sequence[str], *, terminal: bool) -> Sequence[str]:
    """Return the command line that runs a command beside a rank: see `jobs.enter`."""
    from deploykit.backends.slurm import jobs

    return jobs.enter(handle, rank, command, terminal=terminal)


def logs_elsewhere(handle: Handle) -> bool:
    """Whether the run's logs are on a login node."""
    from deploykit.backends.slurm import remote

    return remote.recorded_folder(Path(handle.folder)) is not None


def remains(handle: Handle, output: str) -> Iterator[tuple[str, str]]:  # noqa: ARG001 - the contract
    """Yield what is left on a login node, and how to delete it: see `remote.remains`."""
    from deploykit.backends.slurm import remote

    yield from remote.remains(Path(handle.folder))


def cost(job: JobSpec, options: Options) -> Estimate:
    """Estimate what the job may cost: see `job_cost.estimate`."""
    from deploykit.backends.slurm import job_cost

    return job_cost.estimate(job, options)


def examine(
    job: JobSpec, options: Options, *, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Yield findings about the cluster: see `doctor.examine`."""
    from deploykit.backends.slurm import doctor

    yield from doctor.examine(job, options, saved, save)


def node_names(options: Options) -> Collection[str]:
    """Return the names of all nodes of the cluster."""
    from deploykit.backends.slurm import commands

    argv = ["sinfo", "--all", "--noheader", "--Node", "--format=%N"]
    return set(commands.output(argv, options.host).split())


def missing(absent: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what is missing to submit from this machine."""
    from deploykit.backends.slurm import commands

    over_ssh = "or submit over ssh from here: slurm.host and slurm.folder in the job file"
    if absent:
        yield from ((name, f"run deploykit on a login node, {over_ssh}") for name in absent)
    elif complaint := commands.unreachable():
        yield complaint, f"ask the site whether the cluster is up, {over_ssh}"


def probe(target: str | None) -> Profile:
    """Query a cluster, and write its site profile: see `site.probe`."""
    from deploykit.backends.slurm import site

    return site.probe(target)
