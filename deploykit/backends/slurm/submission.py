"""Submit a plan with sbatch: through submitit on this machine, or over ssh on a login node."""

from __future__ import annotations

import contextlib
import io
import locale
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from deploykit import backend, paths
from deploykit import bundle as bundles
from deploykit.backends.slurm import commands, refusals, run_record
from deploykit.backends.slurm.options import SITE_DEFAULTS
from deploykit.backends.slurm.run_record import RemoteFolder
from deploykit.errors import BackendUnavailable, SubmitRefused, TryAgain
from deploykit.model import Handle, Plan

_PORT_FILE = "rendezvous.json"
"""Where node 0 publishes the port. Other nodes see changes at once if the file exists already."""

_PAUSES = (2.0, 4.0, 8.0)
"""Seconds before each query for a job that the controller may have queued."""

_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "DEPLOYKIT_HOME"}
_LAUNCHERS = ("SLURM", "SBATCH_", "SRUN_", "DEPLOYKIT_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_")
_RANKS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}


class _SbatchFailed(Exception):
    """sbatch failed; its text is what sbatch or ssh printed."""

    def __init__(self, text: str, *, uncertain: bool) -> None:
        super().__init__(text)
        self.uncertain = uncertain
        """Whether the job may be queued nevertheless."""


def submit(plan: Plan, folder: Path) -> Handle:
    """Unpack the source where the nodes see it, and queue exactly `plan.text`.

    Raises SubmitRefused when Slurm refuses the job, BackendUnavailable when it cannot be reached,
    and TryAgain when the job may be queued.
    """
    host = plan.options.host
    remote_folder = None
    if host is None:
        _check_prerequisites(plan)
        bundles.unpack(bundles.store(plan.bundle), folder / "source")
        for name in (*backend.FOLDERS, "sbatch"):
            paths.private_folder(folder / name)
        paths.touch(folder / _PORT_FILE)
    else:
        remote_folder = _deliver(plan, folder)
    if plan.options.array is not None:
        run_record.record_array_size(folder, plan.options.array)
    run_record.record_cluster(folder, commands.cluster_name(host))
    try:
        if remote_folder is None:
            job = _sbatch(plan, folder / "sbatch")
        else:
            job = _sbatch_remotely(plan, remote_folder)
    except _SbatchFailed as error:
        if not error.uncertain:
            raise refusals.error_for(str(error)) from error
        job = _find_queued(plan, folder, str(error))
    run_record.record_job(folder, job)
    return Handle("slurm", plan.target, job, plan.run, str(folder))


def _check_prerequisites(plan: Plan) -> None:
    for program in ("sbatch", "squeue", "scontrol", "srun"):
        if shutil.which(program) is None:
            raise BackendUnavailable(
                f"the program {program!r} is not on PATH",
                hint="submit from a login node of the cluster, or set slurm.host",
            )
    # submitit opens its files in the locale's encoding
    if not plan.text.isascii() and locale.getencoding().lower() != "utf-8":
        raise SubmitRefused(
            f"the script may contain characters that the encoding {locale.getencoding()} lacks",
            hint="export LC_ALL=C.UTF-8",
        )


def _deliver(plan: Plan, folder: Path) -> RemoteFolder:
    """Copy everything to the login node; record first where, for a submit that is interrupted."""
    from deploykit.backends.slurm import remote  # only runs with a host need it

    remote_folder = RemoteFolder(plan.options.host, str(plan.options.run_folder(plan.run)))
    run_record.record_remote_folder(folder, remote_folder)
    remote.deliver(plan, remote_folder)
    return remote_folder


def _sbatch(plan: Plan, folder: Path) -> str:
    """Queue the plan's text with submitit's executor, which keeps a copy in `folder`."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    class PlannedScript(SlurmExecutor):
        """submitit's executor, but the script that it sends is the plan's text."""

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            """The one hook: submitit runs what this returns, for the file that it has written.

            It is the only place to change both the file and the environment of sbatch. submitit
            has filled the file with an empty command; the plan's text replaces it.
            """
            paths.write(submission_file_path, plan.text)
            argv = super()._make_submission_command(submission_file_path)
            return [*clean_environment(plan.text), *argv]

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints errors and raises them
            return str(PlannedScript(folder)._submit_command("").job_id)  # noqa: SLF001
    except (FailedJobError, FailedSubmissionError) as error:
        text = str(error)
        raise _SbatchFailed(text, uncertain=refusals.is_uncertain(text)) from error


def _sbatch_remotely(plan: Plan, folder: RemoteFolder) -> str:
    """Queue the plan's text on the login node."""
    from deploykit.backends.slurm import remote

    try:
        code, out, err = remote.sbatch(plan, folder)
    except BackendUnavailable as error:
        raise _SbatchFailed(str(error), uncertain=True) from error
    job = remote.job_id(out)
    if code == 0 and job is not None:
        return job
    complaint = "\n".join(line for line in err.splitlines() if line.startswith("sbatch: "))
    # without a complaint of sbatch's, something else failed on the way
    uncertain = not complaint or refusals.is_uncertain(complaint)
    raise _SbatchFailed(complaint or err, uncertain=uncertain)


def _find_queued(plan: Plan, folder: Path, text: str) -> str:
    """The id of a job that the controller may have queued although sbatch failed with `text`.

    Raises the error for `text` when the job is not queued, and TryAgain when Slurm does not answer.
    """
    from deploykit.backends.slurm import monitor  # rarely needed

    answered = False
    for pause in _PAUSES:
        time.sleep(pause)
        with contextlib.suppress(BackendUnavailable):
            handle = monitor.find(plan.run, folder, plan.target)
            if handle is not None:
                return handle.id
            answered = True
            if plan.options.host is not None:
                break  # sbatch on a login node held a lock until it had its answer
    if answered:
        raise refusals.error_for(text)
    raise TryAgain(
        f"Slurm does not answer, so the job may or may not be queued: {commands.complaint(text)}",
        hint=f"`deploykit submit --run {plan.run}` with the same job finds it or queues it once",
    )


def clean_environment(text: str) -> list[str]:
    """The words before sbatch that unset the `unwanted` variables, for the script `text`."""
    return ["env", *(word for name in unwanted(os.environ, text) for word in ("-u", name))]


def unwanted(environ: Iterable[str], text: str) -> list[str]:
    """Names of variables that sbatch would pass on to the job, or prefer to the script's options.

    A submit from inside another job, or from one of its ranks, inherits many.
    """
    return sorted(
        name
        for name in environ
        if (name.startswith(_LAUNCHERS) or name in _RANKS)
        and name not in _KEPT
        and not _is_site_default(name, text)
    )


def _is_site_default(name: str, text: str) -> bool:
    """Whether the variable sets an option for which the script leaves the choice to the site."""
    option = name.removeprefix("SBATCH_").lower()
    is_variable = name == f"SBATCH_{option.upper()}"
    return is_variable and option in SITE_DEFAULTS and f"#SBATCH --{option}=" not in text
