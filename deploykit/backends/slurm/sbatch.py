"""What runs sbatch: submit a run or an array of runs, find its job again, ask when it would start.

What a submit and the jobs themselves leave in a run's folder on this machine:

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
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.backends.base import Start
from deploykit.backends.slurm import arrays, commands, remote, script, site, states
from deploykit.backends.slurm.options import Options
from deploykit.backends.slurm.remote import RemoteFolder
from deploykit.backends.slurm.site import Site
from deploykit.bundle import archive as bundles
from deploykit.bundle.node_plane import FOLDER as NODE_PLANE
from deploykit.job.decode import whole
from deploykit.job.model import Handle, Plan, State, Status
from deploykit.lib import paths, progress, shell
from deploykit.lib.errors import BackendUnavailable, SubmitRefused, TryAgain

_PORT_FILE = "rendezvous.json"
"""Where node 0 publishes the port. Other nodes see changes at once if the file exists already."""
_PAUSES = (2.0, 4.0, 8.0)
"""Seconds before each query for a job that the controller may have queued."""
_STARTS = re.compile(r"\bto start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b(?: using (.*))?")
_UTC = ("TZ=UTC", "SLURM_TIME_FORMAT=standard")


class _Uncertain(Exception):
    """sbatch failed, but the job may be queued; the text is what sbatch or ssh printed."""


def submit(plan: Plan, folder: Path) -> Handle:
    """Unpack the source where the nodes see it, and queue exactly `plan.text`.

    Raises SubmitRefused when Slurm refuses the job, BackendUnavailable when it cannot be reached,
    and TryAgain when the job may be queued.
    """
    host = plan.options.host
    if host is None:
        check_prerequisites(plan)
        bundles.unpack(bundles.store(plan.bundle), folder / "source")
        for name in (*backend.FOLDERS, "sbatch"):
            paths.private_folder(folder / name)
        paths.touch(folder / _PORT_FILE)
        send = partial(_sbatch, plan.text, folder / "sbatch")
    else:
        send = partial(_sbatch_remotely, plan.text, remote.deliver(plan, folder))
    if plan.options.array is not None:
        paths.write(folder / "array", arrays.record(plan.options))
    paths.write(folder / "cluster", commands.setting("ClusterName", host) + "\n")
    again = f"`deploykit submit --run {plan.run}` with the same job"
    look = partial(_find_job, plan.run, folder, plan.target)
    job = _queue(send, look, again, waits=host is not None)  # for sbatch, which holds a lock there
    paths.write(folder / "job", job + "\n")
    status = _warn_if_blocked(plan.run, job, host)
    return Handle("slurm", plan.target, job, plan.run, str(folder), status)


def _queue(
    send: Callable[[], str], find: Callable[[], str | None], again: str, *, waits: bool = False
) -> str:
    """Queue a batch script by `send`, and return the id of its job. Raises as `submit`.

    `find` looks for the job if it is uncertain whether it was queued, and with `waits` knows it for
    certain; `again` repeats the submit.
    """
    try:
        return send()
    except _Uncertain as error:
        text = str(error)
    answered = False
    for pause in _PAUSES:
        time.sleep(pause)
        with contextlib.suppress(BackendUnavailable):
            if (job := find()) is not None:
                return job
            answered = True
            if waits:
                break
    if answered:
        raise commands.error_for(text)
    raise TryAgain(
        f"Slurm did not respond, so the job may or may not be queued: {commands.in_one_line(text)}",
        hint=f"run {again} to find the job, or to queue it if it does not exist",
    )


def _warn_if_blocked(run: str, job: str, host: str | None) -> Status | None:
    """Warn of a job that Slurm has queued although it can never start, as most sites do.

    Returns the status of such a job.
    """
    try:
        reason = commands.output(["squeue", "--noheader", f"--jobs={job}", "--format=%r"], host)
    except BackendUnavailable:
        return None  # the job is queued; `wait` asks again
    reason = reason.partition("\n")[0]
    if not states.never_starts(reason):
        return None
    sentence = states.sentence(reason)
    remove = f"run `deploykit cancel {run}` to remove the job"
    progress.warn(f"warning: {run} is queued, but {sentence}; {remove}")
    return Status(State.BLOCKED, "PENDING", sentence)


def check_prerequisites(plan: Plan) -> None:
    """Raise BackendUnavailable or SubmitRefused where sbatch cannot be run here."""
    for program in ("sbatch", "squeue", "scontrol", "srun"):
        if shutil.which(program) is None:
            raise BackendUnavailable(
                f"{program} is not on PATH",
                hint="submit from a login node of the cluster, or set slurm.host",
            )
    # submitit opens its files in the locale's encoding
    if not plan.text.isascii() and locale.getencoding().lower() != "utf-8":
        raise SubmitRefused(
            f"the script contains characters that cannot be encoded in {locale.getencoding()}",
            hint="run `export LC_ALL=C.UTF-8`",
        )


def _sbatch(script: str, folder: Path) -> str:
    """Queue the text of a script with submitit's executor, which keeps a copy in `folder`."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    class PlannedScript(SlurmExecutor):
        """submitit's executor, but the script that it sends is ours."""

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            """Replace the file that submitit has written, and run sbatch without its variables."""
            paths.write(submission_file_path, script)
            argv = super()._make_submission_command(submission_file_path)
            return [*commands.clean_environment(script), *argv]

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints errors and raises them
            return str(PlannedScript(folder)._submit_command("").job_id)  # noqa: SLF001
    except (FailedJobError, FailedSubmissionError) as error:
        raise _failure(str(error)) from error


def _sbatch_remotely(script: str, folder: RemoteFolder) -> str:
    """Queue the text of a script on the login node."""
    try:
        code, out, err = remote.sbatch(folder, commands.site_variables(script))
    except BackendUnavailable as error:
        raise _Uncertain(str(error)) from error
    job = remote.job_id(out)
    if code == 0 and job is not None:
        return job
    complaint = "\n".join(line for line in err.splitlines() if line.startswith("sbatch: "))
    # without a complaint of sbatch's, something else failed on the way
    raise _failure(complaint) if complaint else _Uncertain(err)


def _failure(text: str) -> Exception:
    """The error for what sbatch printed."""
    return _Uncertain(text) if commands.is_uncertain(text) else commands.error_for(text)


def find(run: str, folder: Path, target: str) -> Handle | None:
    """Find the run's job: the one that started first, else the one with the lowest id.

    Returns None where no job was queued, including a job that never started and of which Slurm has
    no record. Raises BackendUnavailable when this cannot be determined.
    """
    job = _find_job(run, folder, target)
    return None if job is None else Handle("slurm", target, job, run, str(folder))


def _find_job(run: str, folder: Path, target: str) -> str | None:
    remote_folder = remote.recorded_folder(folder)
    if remote_folder is None and target != commands.LOCALHOST:
        if not folder.exists():
            raise BackendUnavailable(f"the login node is unknown: {folder} was deleted")
        return None  # the submit was interrupted before anything was copied
    host = None if remote_folder is None else remote_folder.host
    if (problem := commands.wrong_cluster(folder, host)) is not None:
        raise BackendUnavailable(problem, hint="run this command on a machine in that cluster")
    if remote_folder is None:
        job = arrays.claimed_by(folder) or arrays.job_id(folder) or _find_in_array(folder)
        return job or find_by_name(run, None, f"{folder}/source")
    job = remote.find_job(remote_folder)
    return job or find_by_name(run, host, f"{remote_folder.folder}/source")


def _find_in_array(folder: Path) -> str | None:
    """The id of the run's task, where its array was queued and the submit was interrupted then."""
    task = arrays.task_of(folder)
    name = arrays.text_of(task[0] / "name") if task else None
    if task is None or name is None:
        return None
    job = find_by_name(name, None, str(task[0]))
    if job is not None:
        paths.write(task[0] / "job", job + "\n")  # for the other runs
    return arrays.job_id(folder)


def find_by_name(name: str, host: str | None, folder: str) -> str | None:
    """The lowest id of the jobs with that name and working folder, as squeue lists them."""
    rows = states.parse_squeue(commands.output(states.squeue_argv(name), host))
    numbers = [
        int(row.id.partition("_")[0])
        for row in rows
        if (row.name, row.folder) == (name, folder) and not states.was_rejected(row)
    ]
    return str(min(numbers)) if numbers else None


def largest_array(options: Options) -> int:
    """The most runs that the cluster takes as one array; 0 where these options do not allow it.

    Raises BackendUnavailable when the controller does not answer.
    """
    if options.host is not None or options.array is not None:
        return 0
    return whole(commands.setting("MaxArraySize")) or 0


def submit_array(plans: Sequence[Plan], folder: Path, name: str, at_once: int) -> list[Handle]:
    """Queue the plans as one array; see `base.Capabilities.submit_array`."""
    first = plans[0]
    check_prerequisites(first)
    bundles.unpack(bundles.store(first.bundle), folder / "source")
    if first.options.container is None:  # a container sees only the run's folder
        # the tasks share the node plane, and copy the rest of the source
        copied = (folder / "source" / NODE_PLANE).rename(folder / NODE_PLANE)
        (folder / "source" / NODE_PLANE).symlink_to(copied)
    tasks = paths.private_folder(folder / "tasks")
    run_folders = [paths.run_folder(plan.run) for plan in plans]
    for number, run_folder in enumerate(run_folders):
        (tasks / str(number)).symlink_to(run_folder)
        arrays.record_task(run_folder, folder, number)
    paths.write(folder / "name", name + "\n")
    paths.write(folder / "cluster", commands.setting("ClusterName") + "\n")
    paths.private_folder(folder / "sbatch")
    text = _array_script(first, folder, name, f"0-{len(plans) - 1}%{at_once}")
    again = f"`deploykit sweep resume {name}`"
    job = _queue(
        partial(_sbatch, text, folder / "sbatch"),
        partial(find_by_name, name, None, str(folder)),
        again,
    )
    paths.write(folder / "job", job + "\n")
    return [
        Handle("slurm", plan.target, f"{job}_{number}", plan.run, str(run_folders[number]))
        for number, plan in enumerate(plans)
    ]


def _array_script(plan: Plan, folder: Path, name: str, tasks: str) -> str:
    """The batch script of the array: the directives of one of its runs, but for their places."""
    restarts = plan.options.allowed(plan.job)
    values = script.parameters(plan.job, plan.options, name, folder, restarts)
    values["additional_parameters"] |= {
        "array": tasks,
        "chdir": str(folder),
        "output": str(folder / "tasks" / "%a" / "logs" / "slurm.log"),
    }
    text = f"ARRAY_FOLDER={shlex.quote(str(folder))}\n{script.template('slurm_array.sh').rstrip()}"
    return script.batch_script(values, text)


# --- when a job would start


def when(plan: Plan) -> Iterator[Start]:
    """When the job would start in each partition that Slurm knows.

    ``sbatch --test-only`` queues nothing: https://slurm.schedmd.com/sbatch.html#OPT_test-only.
    Raises BackendUnavailable or TryAgain.
    """
    known = site.read(plan.options.host)
    current = known.partition(plan.options.partition)
    for partition in known.partitions:
        start = _start(plan, replace(plan.options, partition=partition.name), known)
        settings = {} if partition == current else {"slurm.partition": partition.name}
        yield start._replace(where=f"partition {partition.name}", settings=settings)


def _start(plan: Plan, options: Options, known: Site) -> Start:
    """When the job would start with these options."""
    # Slurm gives a time in DOWN partitions too
    reasons = [
        problem.message
        for problem in site.rejections(plan.job, options, known)
        if problem.severity == "error" or problem.path == "slurm.partition"
    ]
    if reasons:
        return Start("", options, None, "; ".join(reasons), possible=False)
    text = script.plan(plan.job, options, run=plan.run, bundle=plan.bundle).text
    argv = [*commands.clean_environment(text), *_UTC, "sbatch", "--test-only"]
    if options.host is None:
        code, _, answer = shell.raw(argv, env=dict(os.environ), data=text.encode())
    else:
        code, _, answer = remote.run(options.host, f"exec {shell.command(*argv)}", text.encode())
    match = _STARTS.search(answer)
    if code == 0 and match:
        moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
        return Start("", options, moment, (match[2] or "").strip())
    error = commands.error_for(answer)
    if isinstance(error, BackendUnavailable | TryAgain):
        raise error
    refusal = commands.in_one_line(answer).removeprefix("allocation failure: ")
    return Start("", options, None, refusal, possible=False)
