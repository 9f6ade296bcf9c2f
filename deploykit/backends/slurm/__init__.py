"""A Slurm cluster: one batch job, with one launcher on each node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit import contract
from deploykit.backends.slurm import checks
from deploykit.backends.slurm.options import Options as Options
from deploykit.backends.slurm.script import render_script
from deploykit.doctor.finding import Finding
from deploykit.errors import NotFound
from deploykit.model import Handle, JobSpec, LogLine, Plan, Problem, Profile, Status

if TYPE_CHECKING:
    from deploykit.model import Bundle

SUMMARY = "a Slurm cluster, through sbatch as submitit calls it; one launcher on each node"
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel")
MODULES = ("submitit",)
PREFLIGHT = contract.PREFLIGHT


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Every problem that can be seen without asking the cluster; a site profile is a file."""
    yield from checks.check(job, options)
    if options.site is not None:
        yield from _check_site(job, options, options.site)


def _check_site(job: JobSpec, options: Options, name: str) -> Iterator[Problem]:
    from deploykit.backends.slurm import fits, site

    try:
        yield from fits.check(job, options, site.load(name))
    except NotFound as error:
        yield Problem("slurm.site", str(error), error.hint)


def plan(job: JobSpec, options: Options, *, run: str, bundle: Bundle) -> Plan:
    """The batch script. Needs no Slurm here."""
    text = render_script(job, options, run=run)
    output = job.output or str(options.run_folder(run) / "output")
    place = options.host or "localhost"
    return Plan("slurm", place, run, text, "sh", job, options, bundle, _seen(output, options))


def _seen(folder: str, options: Options) -> str:
    """A folder as the user finds it."""
    return f"{options.host}:{folder}" if options.host else folder


def submit(plan: Plan, folder: Path) -> Handle:
    """Unpack the source for the nodes, and hand exactly `plan.text` to sbatch."""
    from deploykit.backends.slurm.sending import submit as send

    return send(plan, folder)


def find(run: str, folder: Path, target: str) -> Handle | None:
    """The job whose name is the run id, or that claimed the run."""
    from deploykit.backends.slurm import watching

    return watching.find(run, folder, target)


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    from deploykit.backends.slurm import watching

    return watching.status(handles)


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:
    from deploykit.backends.slurm import watching

    return watching.logs(handle, follow=follow)


def cancel(handle: Handle) -> None:
    from deploykit.backends.slurm import watching

    watching.cancel(handle)


def tasks(handle: Handle) -> int | None:
    """The length of the job array that the run is; None where it is none."""
    from deploykit.backends.slurm import sent

    return sent.tasks(Path(handle.folder))


def examine(
    job: JobSpec, options: Options, *, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about the cluster; see `deploykit.backend.Doctor`."""
    from deploykit.backends.slurm import doctor

    yield from doctor.examine(job, options, saved, save)


def probe(target: str | None) -> Profile:
    """Query the cluster of this machine or of a login node, and write its site profile."""
    from deploykit.backends.slurm import doctor

    return doctor.probe(target)
