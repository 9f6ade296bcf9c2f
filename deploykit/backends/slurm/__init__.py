"""The Slurm backend: one batch job, with one launcher on each node.

`check` and `plan` need no Slurm. The functions that watch a job or examine the cluster import their
modules when called, so that a dry run does not pay for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.backends import base as backend
from deploykit.backends.slurm.client import submit as submit
from deploykit.backends.slurm.client import tasks as tasks
from deploykit.backends.slurm.lookup import find as find
from deploykit.backends.slurm.options import Options as Options
from deploykit.backends.slurm.options import bills as bills
from deploykit.backends.slurm.options import check as check
from deploykit.backends.slurm.script import plan as plan
from deploykit.job.model import Handle, JobSpec, LogLine, Plan, Problem, Status

if TYPE_CHECKING:
    from deploykit.backends.base import Profile, Start
    from deploykit.cost.estimate import Estimate
    from deploykit.lib.finding import Finding

SUMMARY = "a Slurm cluster, through sbatch; one launcher on each node"
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "srun")
MODULES = ("submitit",)
PREFLIGHT = backend.PREFLIGHT


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    """Query the status of many runs: see `monitor.status`."""
    from deploykit.backends.slurm import monitor

    return monitor.status(handles)


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:
    """Read the logs of a run: see `monitor.logs`."""
    from deploykit.backends.slurm import monitor

    return monitor.logs(handle, follow=follow)


def logs_elsewhere(handle: Handle) -> bool:
    """Whether the run's logs are on a login node; see `base.Capabilities.logs_elsewhere`."""
    from deploykit.backends.slurm import remote

    return remote.recorded_folder(Path(handle.folder)) is not None


def cancel(handle: Handle) -> None:
    """Cancel a run's job: see `monitor.cancel`."""
    from deploykit.backends.slurm import monitor

    monitor.cancel(handle)


def largest_array(options: Options) -> int:
    """The most runs in one job array: see `run_arrays.largest`."""
    from deploykit.backends.slurm import run_arrays

    return run_arrays.largest(options)


def submit_array(plans: Sequence[Plan], folder: Path, name: str, at_once: int) -> Sequence[Handle]:
    """Submit runs as one job array: see `run_arrays.submit`."""
    from deploykit.backends.slurm import run_arrays

    return run_arrays.submit(plans, folder, name, at_once)


def cancel_all(handles: Sequence[Handle]) -> None:
    """Cancel many runs: see `monitor.cancel_all`."""
    from deploykit.backends.slurm import monitor

    monitor.cancel_all(handles)


def dump(handle: Handle, folder: Path, *, native: bool) -> Sequence[str]:
    """Have each node write the stacks of its ranks: see `stacks.dump`."""
    from deploykit.backends.slurm import stacks

    return stacks.dump(handle, folder, native=native)


def enter(handle: Handle, rank: int, command: Sequence[str], *, terminal: bool) -> Sequence[str]:
    """Run a command beside a rank: see `rank_step.argv`."""
    from deploykit.backends.slurm import rank_step

    return rank_step.argv(handle, rank, command, terminal=terminal)


def remains(handle: Handle, output: str) -> Iterator[tuple[str, str]]:  # noqa: ARG001 - the contract
    """The run's folder on its login node."""
    from deploykit.backends.slurm import remote
    from deploykit.lib import shell

    remote_folder = remote.recorded_folder(Path(handle.folder))
    if remote_folder is not None:
        remove = shell.command("rm", "-r", "--", remote_folder.folder)
        yield (
            f"{remote_folder.host}:{remote_folder.folder}",
            shell.command("ssh", "--", remote_folder.host, remove),
        )


def examine(
    job: JobSpec, options: Options, *, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about the cluster; see `base.Capabilities.examine`."""
    from deploykit.backends.slurm import doctor

    yield from doctor.examine(job, options, saved, save)


def check_function(options: Options) -> Iterator[Problem]:
    """Settings with which no result of a function would come back."""
    for name in ("host", "array"):
        if getattr(options, name):
            hint = "submit a script instead, as a job"
            yield Problem(f"slurm.{name}", "is not supported for functions", hint)


def cost(job: JobSpec, options: Options) -> Estimate:
    """What the job may cost; see `base.Capabilities.cost`."""
    from deploykit.backends.slurm import job_cost

    return job_cost.estimate(job, options)


def when(plan: Plan) -> Iterator[Start]:
    """When the job would start in each partition: see `start_times.of`."""
    from deploykit.backends.slurm import start_times

    yield from start_times.of(plan)


def node_names(options: Options) -> Collection[str]:
    """All nodes of the cluster; see `base.Capabilities.node_names`."""
    from deploykit.backends.slurm import client

    argv = ["sinfo", "--all", "--noheader", "--Node", "--format=%N"]
    return set(client.output(argv, options.host).split())


def missing(absent: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What is missing to submit from this machine; see `base.Capabilities.missing`."""
    from deploykit.backends.slurm import client

    over_ssh = "or submit over ssh from here: slurm.host and slurm.folder in the job file"
    if absent:
        yield from ((each, f"run deploykit on a login node, {over_ssh}") for each in absent)
    elif complaint := client.unreachable():
        yield complaint, f"ask the site whether the cluster is up, {over_ssh}"


def probe(target: str | None) -> Profile:
    """Query the cluster of this machine or of a login node, and write its site profile."""
    from deploykit.backends.slurm import site

    return site.probe(target)
