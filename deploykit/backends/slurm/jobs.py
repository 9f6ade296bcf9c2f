"""Jobs that were submitted: their status, logs and end, and commands beside their ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.backends import ranks
from deploykit.backends.slurm import arrays, commands, remote, states
from deploykit.backends.slurm.states import Row
from deploykit.job.decode import Malformed, read_json
from deploykit.job.model import Handle, LogLine, State, Status
from deploykit.lib import paths, shell
from deploykit.lib.errors import BackendUnavailable, NotPermitted, TryAgain, UsageError
from deploykit.observe import exit_records, logfiles, stacks

_POLL = (1.0, 15.0)
"""Seconds between two queries while a log is followed: the first and the longest pause."""

_QUEUE_MAX_AGE = 60
"""Seconds for which the list of all pending jobs is reused: it may be long."""

_REFUSED = 78
"""Exit code of a script that starts nothing."""
_WAITING = {State.QUEUED, State.BLOCKED}
_NO_RECORD, _EXIT_RECORD = "no record", "exit record"
"""Native states of a job that Slurm no longer knows, without and with an exit record."""


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    """Query the status of many runs.

    Each host costs one squeue; one scontrol, and one sacct, where a job has left the queue; and
    once a minute another squeue where a job is pending. Where Slurm does not answer, the status is
    UNKNOWN with the reason.
    """
    numbers = {handle: arrays.tasks(handle) for handle in handles}
    tasks_by_array = {
        handle: dict(zip(chosen, arrays.task_handles(handle, chosen), strict=True))
        for handle, chosen in numbers.items()
        if chosen
    }
    runs_by_host: dict[str | None, list[Handle]] = defaultdict(list)
    for handle in handles:
        runs_by_host[_host(handle)].append(handle)
    status_by_handle: dict[Handle, Status] = {}
    for host, runs in runs_by_host.items():
        jobs = [
            job
            for run in runs
            for job in (tasks_by_array[run].values() if run in tasks_by_array else [run])
        ]
        status_by_handle |= _status_on(host, runs, jobs)
    for array, tasks in tasks_by_array.items():
        of_tasks = {number: status_by_handle[task] for number, task in tasks.items()}
        status_by_handle[array] = _array_status(array, of_tasks)
    return {handle: status_by_handle[handle] for handle in handles}


def task_status(handle: Handle) -> Mapping[int, Status]:
    """The status of each task of a job array by its number; empty where the run is not one."""
    numbers = arrays.tasks(handle) or ()
    tasks = arrays.task_handles(handle, numbers)
    by_task = _status_on(_host(handle), [handle], tasks) if tasks else {}
    return {number: by_task[task] for number, task in zip(numbers, tasks, strict=True)}


def _array_status(array: Handle, statuses: Mapping[int, Status]) -> Status:
    if any(status.native in {_NO_RECORD, _EXIT_RECORD} for status in statuses.values()) and (
        problem := commands.wrong_cluster(Path(array.folder), _host(array))
    ):
        return Status(State.UNKNOWN, "", problem)
    return arrays.combined_status(statuses)


def _status_on(
    host: str | None, runs: Sequence[Handle], jobs: Sequence[Handle]
) -> Mapping[Handle, Status]:
    """The status of `jobs`: the runs themselves, or the tasks of those that are arrays."""
    try:
        rows = _add_queue_positions(_rows({job.id: job for job in jobs}, host), host)
        if host is not None:
            pairs = ((run, remote.recorded_folder(Path(run.folder))) for run in runs)
            remote.fetch_exit_records(host, [(run, folder) for run, folder in pairs if folder])
        problem = None
    except BackendUnavailable as error:
        rows, problem = {}, str(error)
    return {job: _status(job, rows.get(job.id), problem) for job in jobs}


def _host(handle: Handle) -> str | None:
    """The login node that commands run on; None for this machine."""
    return None if handle.target == commands.LOCALHOST else handle.target


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:
    """Read the logs of all nodes; with `follow`, until the job has ended.

    Raises NotFound when the run's folder was deleted, BackendUnavailable when a login node does not
    answer.
    """
    folder, ended = logfiles.whole(handle), _ended(handle)
    if _host(handle) is not None:
        ended = _fetching_logs(handle, ended)
        ended()
    return logfiles.read(folder, follow=follow, ended=ended, patterns=logfiles.ALL)


def _fetching_logs(handle: Handle, ended: Callable[[], bool]) -> Callable[[], bool]:
    """`ended`, which also fetches the logs, and does so once more after the job has ended.

    It fetches once a second, or less often where that would take most of the time.
    """
    folder, due = Path(handle.folder), 0.0
    remote_folder = remote.recorded_folder(folder)
    if remote_folder is None:
        raise BackendUnavailable(f"{folder} does not record the run's folder on the login node")

    def fetch_and_ask() -> bool:
        nonlocal due
        over, now = ended(), time.monotonic()
        if over or now >= due:
            remote.fetch_logs(remote_folder, folder)
            due = max(now + _POLL[0], now + 5 * (time.monotonic() - now))
        return over

    return fetch_and_ask


def cancel(handle: Handle) -> None:
    """Cancel a job; see `cancel_all`."""
    cancel_all([handle])


def cancel_all(handles: Sequence[Handle]) -> None:
    """Cancel jobs whose name is the run's: Slurm may have given the id to another job.

    The name of an array's task is looked up first: with ``--name`` and the id of a task that waits,
    scancel cancels all tasks of its array that do (22.05). A job that Slurm has no record of is
    ignored. Raises NotPermitted or TryAgain.
    """
    tasks: dict[str, list[Handle]] = defaultdict(list)
    for handle in handles:
        if "_" in handle.id:
            tasks[handle.id.partition("_")[0]].append(handle)
        else:
            _scancel([f"--name={handle.run}", handle.id], handle)
    for array, group in tasks.items():
        rows = {row.id: row for row in _squeue((), _host(group[0]))}
        own = [task.id for task in group if task.id in rows and _is_of(task.run, rows[task.id])]
        numbers = [job.partition("_")[2] for job in own]
        if numbers:
            _scancel([f"{array}_[{','.join(numbers)}]"], group[0])


def _scancel(words: Sequence[str], handle: Handle) -> None:
    result = commands.run(["scancel", *words], _host(handle))
    if result.code == 0 or commands.UNKNOWN_JOB in result.err:
        return
    complaint = commands.in_one_line(result.err)
    if "denied" in result.err or "not permitted" in result.err:
        raise NotPermitted(f"Slurm denied permission to cancel {handle}: {complaint}")
    raise TryAgain(f"scancel: {complaint}", hint="try again")


def _rows(handle_by_job: Mapping[str, Handle], host: str | None) -> dict[str, Row]:
    """Slurm's rows of the jobs, by id. Each source is queried for jobs missing in the previous."""
    row_by_job: dict[str, Row] = {}
    arrays_by_id: dict[str, Row] = {}
    for query in (_squeue, _scontrol, _sacct):
        missing = {job: run.run for job, run in handle_by_job.items() if job not in row_by_job}
        rows = list(query(list(missing), host)) if missing else []
        row_by_job |= {row.id: row for row in rows if _is_of(missing.get(row.id), row)}
        arrays_by_id |= {row.id.partition("_")[0]: row for row in rows if "_" in row.id}
    for job, handle in handle_by_job.items():
        array = arrays_by_id.get(job.partition("_")[0])
        if job in row_by_job or array is None or "_" not in job:
            continue
        # Slurm drops a task that was cancelled while it waited, and keeps the others
        folder = Path(handle.folder)
        begun = os.path.lexists(folder / "claim") or exit_records.read(folder)
        if _is_of(handle.run, array) and not begun:
            row_by_job[job] = Row(job, array.name, "CANCELLED")
    return row_by_job


def _is_of(run: str | None, row: Row) -> bool:
    """Whether a row with the id of a run's job is of that job, and not of a later one."""
    if run is None:
        return False
    return run == row.name or ("_" in row.id and run.startswith(f"{row.name}-"))


def _squeue(_: Sequence[str], host: str | None) -> Iterable[Row]:
    return states.parse_squeue(commands.output(states.squeue_argv(), host))


def _scontrol(ids: Sequence[str], host: str | None) -> Iterable[Row]:
    return states.parse_scontrol(commands.output(states.scontrol_argv(ids), host))


def _sacct(ids: Sequence[str], host: str | None) -> Iterable[Row]:
    with contextlib.suppress(BackendUnavailable):  # the site may have no accounting
        return states.parse_sacct(commands.output(states.sacct_argv(ids), host))
    return ()


def _add_queue_positions(rows: dict[str, Row], host: str | None) -> dict[str, Row]:
    """The rows; those of pending jobs with their position in the queue."""
    waiting = {job: row for job, row in rows.items() if states.has_position(row)}
    if not waiting:
        return rows
    period = int(time.monotonic() / _QUEUE_MAX_AGE)
    pending = _pending(period, host, os.environ.get("SLURM_CONF"))
    return rows | {
        job: row._replace(queue_position=states.describe_position(row, pending))
        for job, row in waiting.items()
    }


@functools.lru_cache(1)
def _pending(_period: int, host: str | None, _conf: str | None) -> states.Queue:
    """The pending jobs of all users; the arguments are the key of the cache."""
    return states.Queue(states.parse_pending(commands.output(states.pending_argv(), host)))


def _status(job: Handle, row: Row | None, problem: str | None) -> Status:
    """The status of a job from `row`, or without one from its exit records."""
    if row is None:
        current = _recorded_status(job, problem)
    else:
        current = _with_awaited(job, states.status(row))
        if current.state in _WAITING and exit_records.attempt(job.folder) is None:
            return current  # it has not started yet: there is no more to read
        current = _with_exit_record(Path(job.folder), current)
        if current.state is State.FAILED and not current.reason:
            current = _without_record(job, current)
    if current.state is State.UNKNOWN:
        return current
    folder = Path(job.folder)
    restarts = states.restarted(_restarts(folder, current.state), current.state)
    slow = ""
    if current.state is State.RUNNING:
        slow = stacks.stall_reason(folder) or exit_records.staging(folder)
    if restarts and not current.state.final and (made := exit_records.decisions(folder)):
        restarts += f" {made[-1].why.removeprefix('restarting ')}" if made[-1].error else ""
    reason = "; ".join(part for part in (current.reason, slow, restarts) if part)
    return current._replace(reason=reason, billed=_billed(job, current, restarted=bool(restarts)))


def _with_awaited(job: Handle, status: Status) -> Status:
    """The status with the runs of `slurm.after` by name, where the reason is a dependency."""
    if states.AWAITED not in status.reason:
        return status
    folder = Path(job.folder)
    run = folder.parents[1] if folder.parent.name == "tasks" else folder
    awaited: list[str] = []
    with contextlib.suppress(OSError, Malformed):
        awaited = list((read_json(run / backend.JOB).get("slurm") or {}).get("after") or ())
    if not awaited:
        return status
    names = f"{'run' if len(awaited) == 1 else 'runs'} {', '.join(awaited)}"
    return status._replace(reason=status.reason.replace(states.AWAITED, names))


def _billed(job: Handle, status: Status, *, restarted: bool) -> float | None:
    """Seconds that a job that has ended was allocated, in all its attempts; None where unknown."""
    if not status.state.final or status.finished is None:
        return None
    if status.started is None:
        return 0.0 if status.state is State.CANCELLED else None  # a job that never started
    if not restarted:
        return max(0.0, (status.finished - status.started).total_seconds())
    with contextlib.suppress(BackendUnavailable):  # the site may have no accounting
        output = commands.output(states.elapsed_argv(job.id), _host(job))
        return states.parse_elapsed(output, job.id)
    return None


def _restarts(folder: Path, state: State) -> list[str]:
    """The reasons of the restarts, including one that the job is waiting for."""
    attempt = exit_records.attempt(folder)
    if attempt is None:
        return []
    reasons = exit_records.restarts(folder, upto=attempt if state.final else None)
    is_pending = state in _WAITING and len(reasons) == attempt
    return [*reasons, "not known yet"] if is_pending else reasons


def _with_exit_record(folder: Path, status: Status) -> Status:
    """A failed status with the trainer's exit code and the launcher's reason.

    The job is a success if all ranks had exited with 0 before Slurm ended it.
    """
    records = _last_exit_records(folder) if status.state is State.FAILED else []
    if not records:
        return status
    end = records[0]
    if end.exit_code == 0:
        if exit_records.processes(folder):
            return status  # ranks of a node without a record
        last = max(record.finished for record in records).replace(microsecond=0)
        if status.finished is not None and last > status.finished:
            return status  # a signal of Slurm's may have ended them
        reason = f"{end.reason}; Slurm ended the job afterwards ({status.native})"
        return status._replace(state=State.SUCCEEDED, exit_code=0, reason=reason)
    if status.native == "FAILED" or end.exit_code == exit_records.STOPPED:
        return status._replace(exit_code=end.exit_code, reason=end.reason)
    return status


def _without_record(job: Handle, status: Status) -> Status:
    """A failed job with the reason of its script, which may end it before a launcher starts."""
    folder = Path(job.folder)
    task = folder.name if folder.parent.name == "tasks" else ""  # of an array that is one run
    run = folder.parents[1] if task else folder
    if (remote_folder := remote.recorded_folder(run)) is not None:
        with contextlib.suppress(BackendUnavailable):  # the status is complete without it
            remote.fetch_logs(remote_folder, run)
    if refusal := logfiles.refusal(run / "logs" / (f"slurm-{task}.log" if task else "slurm.log")):
        return status._replace(exit_code=_REFUSED, reason=refusal)
    killed = "all processes were killed before any process recorded a reason"
    return status._replace(reason=killed)


def _recorded_status(job: Handle, problem: str | None) -> Status:
    """The status of a job that Slurm has no record of, or that it cannot be asked about."""
    folder = Path(job.folder)
    problem = problem or commands.wrong_cluster(folder, _host(job))
    if problem is not None:
        return Status(State.UNKNOWN, "", problem)
    records = _last_exit_records(folder)
    if not records:
        reason = (
            "Slurm has no record of the job, and no exit record was written: the job was "
            "cancelled, killed or never started"
        )
        return Status(State.FAILED, _NO_RECORD, reason)
    end = records[0]
    state = State.SUCCEEDED if end.exit_code == 0 else State.FAILED
    return Status(state, _EXIT_RECORD, end.reason, end.exit_code, finished=end.finished)


def _last_exit_records(folder: Path) -> list[exit_records.ExitRecord]:
    """The records of the last attempt: failures first, then by the time of their end."""
    records = exit_records.read(folder)
    last = max((record.attempt for record in records), default=0)
    return [record for record in records if record.attempt == last]


def _ended(handle: Handle) -> Callable[[], bool]:
    """Whether the job has ended. Queries Slurm less and less often, and after each exit record."""
    final, due, known = False, 0.0, 0
    pause, longest = _POLL

    def ask() -> bool:
        nonlocal final, due, known, pause
        count, now = len(exit_records.read(Path(handle.folder))), time.monotonic()
        if count > known:
            pause = _POLL[0]
        if not final and (now >= due or count > known):
            final = status([handle])[handle].state.final
            pause = min(pause * 1.3, longest)
            due, known = now + pause, count
        return final

    return ask


# --- commands beside the ranks

_DUMP_TIMEOUT = 120.0
"""Seconds for all nodes."""


def dump(handle: Handle, folder: Path, *, native: bool) -> Sequence[str]:
    """Have each node write the stacks of its ranks, with one short step beside them.

    Returns what srun complains of.
    """
    if arrays.tasks(handle) is not None:
        raise UsageError(
            f"{handle.run} is a job array; `dump` does not support single array tasks yet",
            hint=f"run `py-spy dump --pid PID` on the task's node ({handle.id}_TASK)",
        )
    processes = exit_records.processes(Path(handle.folder))
    ranks.require_processes(processes, handle.run)
    remote_folder = remote.recorded_folder(Path(handle.folder))
    run_folder = remote_folder.folder if remote_folder else handle.folder
    kept = f"{run_folder}/{stacks.FOLDER}/{folder.name}"
    hosts = sorted({process.host for process in processes})
    argv = [
        *step_argv(handle, hosts),
        *("--input=none", "--ntasks-per-node=1", "--kill-on-bad-exit=0"),
        *ranks.dump_command(processes[0], "slurm", (run_folder, kept), native=native),
    ]
    if remote_folder is None:
        code, _, err = shell.run([*commands.clean_environment(""), *argv], timeout=_DUMP_TIMEOUT)
    else:
        script = f"{shlex.join(argv)}; code=$?; cat {shlex.quote(kept)}/*.json; exit $code"
        code, out, err = remote.run(remote_folder.host, script)
        paths.make_folder(folder)
        for number, line in enumerate(out.splitlines()):
            paths.write(folder / f"node-{number}.json", line + b"\n")
    return [f"srun: {commands.in_one_line(err)}"] if code else []


def enter(handle: Handle, rank: int, command: Sequence[str], *, terminal: bool) -> Sequence[str]:
    """The command line of this machine that runs a command beside a rank."""
    if arrays.tasks(handle) is not None:
        raise UsageError(
            f"{handle.run} is a job array; `exec` and `shell` do not support array tasks yet",
            hint=f"run `srun --overlap --pty --jobid={handle.id}_TASK bash`",
        )
    folder = Path(handle.folder)
    process = ranks.rank_process(exit_records.processes(folder), handle.run, rank)
    remote_folder = remote.recorded_folder(folder)
    argv = [
        *step_argv(handle, [process.host]),
        *(["--pty"] if terminal else []),
        *ranks.enter_command(
            process, "slurm", remote_folder.folder if remote_folder else str(folder), command
        ),
    ]
    if remote_folder is None:
        return [*commands.clean_environment(""), *argv]
    return remote.attached(remote_folder.host, f"exec {shlex.join(argv)}", terminal=terminal)


def step_argv(handle: Handle, hosts: Sequence[str]) -> list[str]:
    """The beginning of a step with one task on each host, beside the steps that run there.

    https://slurm.schedmd.com/srun.html#OPT_overlap. Raises BackendUnavailable.
    """
    job, count = handle.id, len(hosts)
    if "_" in job:  # srun does not accept the id of an array's task
        job = commands.output(["squeue", "--noheader", f"--jobs={job}", "--format=%A"]).strip()
    return [
        *("srun", f"--jobid={job or handle.id}", "--overlap", "--quiet"),
        *(f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(hosts)}"),
    ]
