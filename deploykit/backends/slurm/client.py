"""A client of Slurm: runs its commands, submits plans with sbatch, and finds the jobs again.

Commands run on this machine, or over ssh on a login node. What a submit and the jobs themselves
leave in a run's folder on this machine:

======================  ==========================================================
``remote.json``         the login node and its folder, where the run has a host
``array``               the number of tasks, where the run is a job array
``cluster``             the name of the cluster that the job was submitted to
``job``                 the id of the job
``claim``               a link whose target is the id of the job that started first
======================  ==========================================================
"""

from __future__ import annotations

import contextlib
import io
import locale
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deploykit.backends import base as backend
from deploykit.backends.slurm import complaints
from deploykit.bundle import archive as bundles
from deploykit.job.model import Handle, Plan, State, Status
from deploykit.lib import paths
from deploykit.lib.errors import BackendUnavailable, SubmitRefused, TryAgain

if TYPE_CHECKING:
    from deploykit.backends.slurm.remote import RemoteFolder
    from deploykit.lib.shell import Result

LOCALHOST = "localhost"
"""The target of a run that is submitted from this machine."""

_PORT_FILE = "rendezvous.json"
"""Where node 0 publishes the port. Other nodes see changes at once if the file exists already."""

_PAUSES = (2.0, 4.0, 8.0)
"""Seconds before each query for a job that the controller may have queued."""

_USUAL = {"", "None", "Resources", "Priority"}
"""Reasons of jobs that start sooner or later."""

_SITE_DEFAULTS = ("account", "partition", "qos", "reservation", "constraint")
"""Options for which a variable such as ``SBATCH_ACCOUNT`` counts, unless the script sets them."""
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "DEPLOYKIT_HOME"}
_LAUNCHERS = ("SLURM", "SBATCH_", "SRUN_", "DEPLOYKIT_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_")
_RANKS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}

_PATIENCE = 10
"""Seconds for a query whose only purpose is to learn whether the controller answers."""


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
        check_prerequisites(plan)
        bundles.unpack(bundles.store(plan.bundle), folder / "source")
        for name in (*backend.FOLDERS, "sbatch"):
            paths.private_folder(folder / name)
        paths.touch(folder / _PORT_FILE)
    else:
        from deploykit.backends.slurm import remote  # only runs with a host need it

        remote_folder = remote.deliver(plan, folder)
    if plan.options.array is not None:
        paths.write(folder / "array", f"{plan.options.array}\n")
    paths.write(folder / "cluster", cluster_name(host) + "\n")
    again = f"`deploykit submit --run {plan.run}` with the same job"
    request = Request(plan.text, folder, again, remote_folder)
    job = queue(request, lambda: _job_of(plan, folder))
    paths.write(folder / "job", job + "\n")
    status = _warn_if_blocked(plan.run, job, host)
    return Handle("slurm", plan.target, job, plan.run, str(folder), status)


class Request(NamedTuple):
    """A batch script to be queued."""

    text: str
    folder: Path
    again: str
    """What repeats the submit."""
    remote_folder: RemoteFolder | None = None


def queue(request: Request, find: Callable[[], str | None]) -> str:
    """Queue a batch script, and return the id of its job. `find` asks Slurm for an uncertain one.

    Raises as `submit`.
    """
    try:
        if request.remote_folder is None:
            return _sbatch(request.text, request.folder / "sbatch")
        return _sbatch_remotely(request.text, request.remote_folder)
    except _SbatchFailed as error:
        if not error.uncertain:
            raise complaints.error_for(str(error)) from error
        return _find_queued(request, find, str(error))


def _job_of(plan: Plan, folder: Path) -> str | None:
    from deploykit.backends.slurm import lookup  # only where sbatch was interrupted

    handle = lookup.find(plan.run, folder, plan.target)
    return None if handle is None else handle.id


def _warn_if_blocked(run: str, job: str, host: str | None) -> Status | None:
    """Warn of a job that Slurm has queued although it can never start, as most sites do.

    Returns the status of such a job.
    """
    try:
        reason = output(["squeue", "--noheader", f"--jobs={job}", "--format=%r"], host)
    except BackendUnavailable:
        return None  # the job is queued; `wait` asks again
    reason = reason.partition("\n")[0]
    if reason in _USUAL:
        return None
    from deploykit.backends.slurm import states

    if not states.never_starts(reason):
        return None
    import logging  # for this message only

    sentence = states.sentence(reason)
    text = "warning: %s is queued, but %s; to remove it: deploykit cancel %s"
    logging.getLogger(__name__).warning(text, run, sentence, run)
    return Status(State.BLOCKED, "PENDING", sentence)


def check_prerequisites(plan: Plan) -> None:
    """Raise BackendUnavailable or SubmitRefused where sbatch cannot be run here."""
    import shutil  # not needed for a dry run

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


def _sbatch(script: str, folder: Path) -> str:
    """Queue the text of a script with submitit's executor, which keeps a copy in `folder`."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    class PlannedScript(SlurmExecutor):
        """submitit's executor, but the script that it sends is ours."""

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            """The one hook: submitit runs what this returns, for the file that it has written.

            It is the only place to change both the file and the environment of sbatch. submitit
            has filled the file with an empty command; our text replaces it.
            """
            paths.write(submission_file_path, script)
            argv = super()._make_submission_command(submission_file_path)
            return [*clean_environment(script), *argv]

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints errors and raises them
            return str(PlannedScript(folder)._submit_command("").job_id)  # noqa: SLF001
    except (FailedJobError, FailedSubmissionError) as error:
        text = str(error)
        raise _SbatchFailed(text, uncertain=complaints.is_uncertain(text)) from error


def _sbatch_remotely(script: str, folder: RemoteFolder) -> str:
    """Queue the text of a script on the login node."""
    from deploykit.backends.slurm import remote

    try:
        code, out, err = remote.sbatch(folder, site_variables(script))
    except BackendUnavailable as error:
        raise _SbatchFailed(str(error), uncertain=True) from error
    job = remote.job_id(out)
    if code == 0 and job is not None:
        return job
    complaint = "\n".join(line for line in err.splitlines() if line.startswith("sbatch: "))
    # without a complaint of sbatch's, something else failed on the way
    uncertain = not complaint or complaints.is_uncertain(complaint)
    raise _SbatchFailed(complaint or err, uncertain=uncertain)


def clean_environment(text: str) -> list[str]:
    """The words before sbatch that unset the `unwanted` variables, for the script `text`."""
    return ["env", *(word for name in unwanted(os.environ, text) for word in ("-u", name))]


def unwanted(environ: Iterable[str], text: str) -> list[str]:
    """Names of variables that sbatch would pass on to the job, or prefer to the script's options.

    A submit from inside another job, or from one of its ranks, inherits many.
    """
    kept = _KEPT.union(site_variables(text))
    return sorted(
        name
        for name in environ
        if (name.startswith(_LAUNCHERS) or name in _RANKS) and name not in kept
    )


def site_variables(text: str) -> list[str]:
    """The variables that set what the script `text` leaves to the site's defaults."""
    left = (name for name in _SITE_DEFAULTS if f"#SBATCH --{name}=" not in text)
    return [f"SBATCH_{name.upper()}" for name in left]


def _find_queued(request: Request, find: Callable[[], str | None], text: str) -> str:
    """The id of a job that the controller may have queued although sbatch failed with `text`.

    Raises the error for `text` when the job is not queued, and TryAgain when Slurm does not answer.
    """
    answered = False
    for pause in _PAUSES:
        time.sleep(pause)
        with contextlib.suppress(BackendUnavailable):
            if (job := find()) is not None:
                return job
            answered = True
            if request.remote_folder is not None:
                break  # sbatch on a login node held a lock until it had its answer
    if answered:
        raise complaints.error_for(text)
    complaint = complaints.in_one_line(text)
    raise TryAgain(
        f"Slurm did not respond, so the job may or may not be queued: {complaint}",
        hint=f"{request.again} finds it or queues it once",
    )


def tasks(handle: Handle) -> int | None:
    """The length of the run's job array; None where the run is not an array."""
    text = text_of(f"{handle.folder}/array")  # no path object: there may be thousands of handles
    return None if text is None else int(text)


def job_id(folder: Path) -> str | None:
    """The id that sbatch gave the job; None where no job was submitted from this machine."""
    from deploykit.backends.slurm import array_record

    return text_of(folder / "job") or array_record.job_id(folder)


def text_of(path: Path | str) -> str | None:
    """The text of a record without its line end; None where there is none."""
    try:
        with open(path) as file:  # noqa: PTH123 - as text
            return file.read().strip()
    except FileNotFoundError:
        return None


def run(argv: Sequence[str], host: str | None = None) -> Result:
    """Run a command of Slurm's here, or on the login node `host`, whatever its exit code.

    Raises BackendUnavailable when the command is missing or the connection fails.
    """
    from deploykit.lib import shell  # not needed for a dry run

    if host is not None:
        from deploykit.backends.slurm import ssh  # only runs with a host need it

        return ssh.run_slurm(host, argv)
    return shell.run(argv, env=query_environment(os.environ))


def output(argv: Sequence[str], host: str | None = None) -> str:
    """The standard output of a command; empty when the only job id in `argv` is unknown to Slurm.

    Raises BackendUnavailable when the command fails for another reason.
    """
    result = run(argv, host)
    if result.code == 0 or complaints.names_unknown_job(result.err):
        return result.out
    message = f"{argv[0]}: {complaints.in_one_line(result.err)}"
    raise BackendUnavailable(message, hint=complaints.UNREACHABLE_HINT)


def cluster_name(host: str | None = None) -> str:
    """The name of the cluster that commands here, or on `host`, talk to.

    Raises BackendUnavailable when the controller does not answer.
    """
    match = re.search(r"^ClusterName\s*=\s*(\S+)", config(host), re.MULTILINE)
    return match[1] if match else ""


def config(host: str | None = None) -> str:
    """The settings of the cluster, as Slurm prints them. Raises as `cluster_name`."""
    return output(["scontrol", "show", "config"], host)


def unreachable() -> str | None:
    """Why the controller of this machine's cluster would accept no job; None where it answers.

    `scontrol ping` answers at once where `sinfo` waits for 9 s; only `sinfo` proves who asks.
    """
    from deploykit.lib import shell

    for argv in (["scontrol", "ping"], ["sinfo", "--noheader", "--format=%P"]):
        try:
            result = shell.run(argv, env=query_environment(os.environ), timeout=_PATIENCE)
        except BackendUnavailable as error:
            return str(error)
        if result.code or not result.out.strip():
            complaint = result.err or result.out.partition("\n")[0]
            return f"{argv[0]}: {complaints.in_one_line(complaint).rpartition('; ')[2]}"
    return None


def query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for Slurm's query commands: no filters or formats of the user's, times in UTC.

    ``SLURM_BITSTR_LEN=0`` makes squeue print every task id of a job array:
    https://slurm.schedmd.com/squeue.html#OPT_SLURM_BITSTR_LEN
    """
    overrides = ("SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_TIME_FORMAT")
    kept = {name: value for name, value in environ.items() if not name.startswith(overrides)}
    return {**kept, "TZ": "UTC", "SLURM_BITSTR_LEN": "0"}
