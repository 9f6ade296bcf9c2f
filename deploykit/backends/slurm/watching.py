"""Ask Slurm about jobs, and stop them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deploykit import exit_records, logfiles, shell
from deploykit.backends.slurm import arrays, machine, remote, sent, states, turns
from deploykit.backends.slurm.sent import Place
from deploykit.backends.slurm.states import Row
from deploykit.decode import whole
from deploykit.errors import BackendUnavailable, NotPermitted, TryAgain
from deploykit.model import Handle, LogLine, State, Status

CLUSTER = "cluster"
"""File in the run's folder: the name of the cluster that it was sent to."""

_ASK_AGAIN = (1.0, 15.0)
"""Seconds between two questions while a log is followed: at first, and in the end."""

_QUEUE_AGE = 60
"""Seconds for which the queue of all users is remembered: it may be long."""

_NOT_SLURMS = _FORGOTTEN, _ENDED = "forgotten", "ended"
"""Native states of a job that Slurm does not know any more."""

_UNKNOWN_JOB = "Invalid job id specified"


def find(run: str, folder: Path, target: str) -> Handle | None:
    """The job of the run: the one that claimed it, else the first of its name in its folder.

    A job that Slurm has forgotten and that left no claim never ran.
    """
    there = sent.place(folder)
    if there is None and target != machine.HERE:
        if not folder.exists():
            raise BackendUnavailable(f"{folder}, which said where it was sent from, was deleted")
        return None  # it broke off before anything was sent
    if (why_not := _elsewhere(folder)) is not None:
        raise BackendUnavailable(why_not, hint="run this command on a machine of that cluster")
    first = (claimed(folder) or sent.job(folder)) if there is None else remote.job(there)
    if first is None:
        host, work = (there.host, there.folder) if there else (None, str(folder))
        found = list(states.parse_squeue(asked(states.squeue_argv(run), host)))
        ids = (row.id for row in found if (row.name, row.folder) == (run, f"{work}/source"))
        numbers = (whole(job.partition("_")[0]) for job in ids)
        least = min((number for number in numbers if number is not None), default=None)
        first = None if least is None else str(least)
    return None if first is None else Handle("slurm", target, first, run, str(folder))


def claimed(folder: Path) -> str | None:
    """The id of the job that started the run."""
    try:
        claim = os.readlink(folder / "claim")  # noqa: PTH115 - it is no path
    except OSError:
        return None
    return claim if whole(claim) is not None else None


def status(handles: Sequence[Handle]) -> Mapping[Handle, Status]:
    """One squeue for all; for those that have ended scontrol, sacct, and what they left behind.

    Another squeue, once in a while, where one waits for its turn.
    """
    counts = {handle: sent.tasks(Path(handle.folder)) for handle in handles}
    members = {handle: arrays.handles(handle, n) for handle, n in counts.items() if n}
    groups: dict[str | None, list[Handle]] = defaultdict(list)
    for handle in handles:
        groups[_host(handle)].append(handle)
    found: dict[Handle, Status] = {}
    for host, runs in groups.items():
        found |= _status_at(host, runs, [one for run in runs for one in members.get(run, [run])])
    for handle, tasks in members.items():
        found[handle] = _whole(handle, [found[task] for task in tasks])
    return {handle: found[handle] for handle in handles}


def _whole(array: Handle, tasks: Sequence[Status]) -> Status:
    """The status of an array; where Slurm does not know its tasks, this may be another cluster."""
    lost = any(task.native in _NOT_SLURMS for task in tasks)
    why_not = _elsewhere(Path(array.folder)) if lost else None
    return Status(State.UNKNOWN, "", why_not) if why_not else arrays.status(tasks)


def _status_at(
    host: str | None, runs: Sequence[Handle], handles: Sequence[Handle]
) -> Mapping[Handle, Status]:
    """The status of `handles`, which are those of the runs or, of an array, of its tasks."""
    try:
        rows = _with_turns(_rows({handle.id: handle for handle in handles}, host), host)
        if host is not None:
            remote.fetch_ends(host, [(run, there) for run in runs if (there := _place(run))])
        answer = None
    except BackendUnavailable as error:
        rows, answer = {}, str(error)
    return {handle: _status(handle, rows.get(handle.id), answer) for handle in handles}


def _place(handle: Handle) -> Place | None:
    return sent.place(Path(handle.folder))


def _there(handle: Handle) -> Place:
    place = _place(handle)
    if place is None:
        raise BackendUnavailable(f"{handle.folder} does not say any more where the run lies")
    return place


def _host(handle: Handle) -> str | None:
    """The machine from which its cluster is asked; None: this one."""
    return None if handle.target == machine.HERE else handle.target


def logs(handle: Handle, *, follow: bool) -> Iterator[LogLine]:
    folder, ended = logfiles.whole(handle), _ended(handle)
    if _host(handle) is not None:
        ended = _fetching(handle, ended)
        ended()
    return logfiles.read(folder, follow=follow, ended=ended, patterns=remote.LOGS)


def _fetching(handle: Handle, ended: Callable[[], bool]) -> Callable[[], bool]:
    """The same question; the logs here are then as new as the answer, or some seconds old."""
    due = 0.0

    def fetched() -> bool:
        nonlocal due
        over = ended()
        if over or time.monotonic() >= due:
            remote.fetch_logs(_there(handle), Path(handle.folder))
            due = time.monotonic() + _ASK_AGAIN[0]
        return over

    return fetched


def cancel(handle: Handle) -> None:
    """Both the id and the name must fit: an id alone may have become another job's."""
    done = _run(["scancel", f"--name={handle.run}", handle.id], _host(handle))
    if done.code == 0 or _UNKNOWN_JOB in done.err:
        return
    said = spoken(done.err)
    if "denied" in done.err or "not permitted" in done.err:
        raise NotPermitted(f"Slurm does not let you cancel {handle}: {said}")
    raise TryAgain(f"scancel: {said}", hint="try again")


def cluster(host: str | None = None) -> str:
    """The name of the cluster that the commands here, or on `host`, talk to."""
    settings = asked(["scontrol", "show", "config"], host)
    match = re.search(r"^ClusterName\s*=\s*(\S+)", settings, re.MULTILINE)
    return match[1] if match else ""


def spoken(err: str) -> str:
    """What a command of Slurm's said, without its own name."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line) for line in err.strip().splitlines()]
    return "; ".join(line.strip() for line in lines if line.strip()) or "no reason given"


def _rows(wanted: Mapping[str, Handle], host: str | None) -> dict[str, Row]:
    """What Slurm knows of the jobs, most lively source first."""
    found: dict[str, Row] = {}
    for ask in (_queued, _remembered, _recorded):
        missing = {job: handle.run for job, handle in wanted.items() if job not in found}
        if missing:
            rows = ask(list(missing), host)
            found |= {row.id: row for row in rows if missing.get(row.id) == row.name}
    return found


def _with_turns(rows: dict[str, Row], host: str | None) -> dict[str, Row]:
    """The rows; those that wait for their turn with what is known of it."""
    if not any(map(turns.in_line, rows.values())):
        return rows
    queue = _queue(int(time.monotonic() / _QUEUE_AGE), host, os.environ.get("SLURM_CONF"))
    return {
        job: replace(row, turn=turns.words(row, queue)) if turns.in_line(row) else row
        for job, row in rows.items()
    }


@functools.lru_cache(1)
def _queue(_age: int, host: str | None, _conf: str | None) -> list[turns.Waiting]:
    return list(turns.parse(asked(turns.argv(), host)))


def _queued(_: Sequence[str], host: str | None) -> Iterable[Row]:
    return states.parse_squeue(asked(states.squeue_argv(), host))


def _remembered(ids: Sequence[str], host: str | None) -> Iterable[Row]:
    return states.parse_scontrol(asked(states.scontrol_argv(ids), host))


def _recorded(ids: Sequence[str], host: str | None) -> Iterable[Row]:
    with contextlib.suppress(BackendUnavailable):
        return states.parse_sacct(asked(states.sacct_argv(ids), host))
    return ()


def _status(handle: Handle, row: Row | None, why_not: str | None) -> Status:
    folder = Path(handle.folder)
    told = _left_behind(folder, why_not) if row is None else _truer(folder, states.status(row))
    again = states.restarted(_restarts(folder, told.state), told.state)
    reason = "; ".join(part for part in (told.reason, again) if part)
    return told if told.state is State.UNKNOWN else replace(told, reason=reason)


def _restarts(folder: Path, state: State) -> list[str]:
    """The reasons of the restarts, with the one that is to come where the job waits for it."""
    begun = exit_records.attempt(folder)
    if begun is None:
        return []
    found = exit_records.restarts(folder, upto=begun if state.final else None)
    unknown = state is State.QUEUED and len(found) == begun
    return [*found, "not known yet"] if unknown else found


def _truer(folder: Path, told: Status) -> Status:
    """With the trainer's own exit code, and what its launcher had to say."""
    if told.state is not State.FAILED:
        return told
    end = _end(folder)
    if end is None and not told.reason:
        return replace(told, reason="all its processes were killed, and none could say why")
    if end is None or end.exit_code == 0:
        return told
    if told.native == "FAILED" or end.exit_code == exit_records.STOPPED:
        return replace(told, exit_code=end.exit_code, reason=end.reason)
    return told


def _left_behind(folder: Path, why_not: str | None) -> Status:
    """The status of a job that Slurm does not know any more, or cannot be asked about."""
    why_not = why_not or _elsewhere(folder)
    if why_not is not None:
        return Status(State.UNKNOWN, "", why_not)
    end = _end(folder)
    if end is None:
        reason = "Slurm has forgotten it, and it left no word: cancelled, killed or never run"
        return Status(State.FAILED, _FORGOTTEN, reason)
    state = State.SUCCEEDED if end.exit_code == 0 else State.FAILED
    return Status(state, _ENDED, end.reason, end.exit_code, finished=end.finished)


def _end(folder: Path) -> exit_records.ExitRecord | None:
    """The end of the last attempt: the first failure, else the first node that ended."""
    found = exit_records.read(folder)
    last = max((end.attempt for end in found), default=0)
    return next((end for end in found if end.attempt == last), None)


def _elsewhere(folder: Path) -> str | None:
    """Why this is not the cluster that the run was sent to; None where it is."""
    try:
        sent_to = (folder / CLUSTER).read_text().strip()
        place = sent.place(folder)
        here = cluster(place.host if place else None)
    except FileNotFoundError:
        return None
    except BackendUnavailable as error:
        return str(error)
    if sent_to == here:
        return None
    return f"the run was sent to the Slurm cluster {sent_to!r}, and this is {here!r}"


def _ended(handle: Handle) -> Callable[[], bool]:
    """Whether the job has ended; asks Slurm ever more rarely, and when a node has left a word."""
    final, due, words = False, 0.0, 0
    pause, longest = _ASK_AGAIN

    def ended() -> bool:
        nonlocal final, due, words, pause
        left, now = len(exit_records.read(Path(handle.folder))), time.monotonic()
        if left > words:
            pause = _ASK_AGAIN[0]
        if not final and (now >= due or left > words):
            final = status([handle])[handle].state.final
            pause = min(pause * 1.3, longest)
            due, words = now + pause, left
        return final

    return ended


def asked(argv: Sequence[str], host: str | None = None) -> str:
    """What a command answered; nothing where the one job that it asked for is unknown.

    Raises BackendUnavailable when Slurm does not answer.
    """
    done = _run(argv, host)
    if done.code == 0 or _UNKNOWN_JOB in done.err:
        return done.out
    raise BackendUnavailable(
        f"{argv[0]}: {spoken(done.err)}", hint="is this a machine of the cluster, and is it up?"
    )


def _run(argv: Sequence[str], host: str | None = None) -> shell.Result:
    if host is not None:
        return machine.ask(host, argv)
    return shell.run(argv, env=states.environment(os.environ))
