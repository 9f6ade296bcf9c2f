"""The commands that ask Slurm about jobs, the parsers of their output, and Slurm's states.

Pure functions: nothing here runs a command.
"""

from __future__ import annotations

import re
import signal
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from deploykit.backends.slurm import arrays
from deploykit.job.decode import whole
from deploykit.job.model import State, Status
from deploykit.lib.units import plural


class Row(NamedTuple):
    """One job as squeue, scontrol or sacct describes it."""

    id: str
    name: str
    native: str
    reason: str = ""
    started: datetime | None = None
    finished: datetime | None = None
    code: str = ""
    """Exit code and signal: ``1:0``."""
    folder: str = ""
    """Its working directory; only squeue gives it."""
    nodes: str = ""
    """The number of nodes, as squeue prints it."""
    partition: str = ""
    """Its partition, or several separated by commas while it is pending."""
    priority: int = 0
    queue_position: str = ""
    """A sentence about its position in the queue, where `has_position`."""
    requeued: bool = False
    """Whether Slurm requeues it after a preemption or a node failure."""


_NATIVE_STATES = {
    State.QUEUED: (
        *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"),
        "RESV_DEL_HOLD",
    ),
    State.RUNNING: ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"),
    State.STOPPING: ("COMPLETING",),
    State.SUCCEEDED: ("COMPLETED",),
    State.CANCELLED: ("CANCELLED", "REVOKED"),
    State.FAILED: (
        *("FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"),
        *("LAUNCH_FAILED", "RECONFIG_FAIL"),
    ),
}
_STATES = {name: state for state, names in _NATIVE_STATES.items() for name in names}
"""Slurm's states and deploykit's; any other is UNKNOWN.

https://slurm.schedmd.com/job_state_codes.html
"""

_REQUEUEABLE = {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"}
"""States that are final only where Slurm does not requeue the job."""

_HELD = "requeued and held; run `scontrol release` to release it"
_STATE_REASONS = {
    "CONFIGURING": "its nodes are starting up",
    "REQUEUED": "requeued",
    **dict.fromkeys(("REQUEUE_HOLD", "SPECIAL_EXIT"), _HELD),
    "SUSPENDED": "suspended by Slurm; its processes are stopped",
    "CANCELLED": "cancelled",
    "REVOKED": "moved to another cluster",
    "TIMEOUT": "stopped at its time limit; raise resources.time_limit",
    "DEADLINE": "could not have finished before its deadline",
    "OUT_OF_MEMORY": "a node used more memory than requested; raise resources.memory",
    "NODE_FAIL": "a node failed",
    "PREEMPTED": "preempted by a higher-priority job",
    "BOOT_FAIL": "a node did not boot",
    "LAUNCH_FAILED": "a node could not launch the job",
}
"""Reasons for states that the trainer did not cause."""

_EXIT_CODES = {"TIMEOUT": 124, "OUT_OF_MEMORY": 137}
"""Exit codes for states in which Slurm reports none of a program."""

AWAITED = "the job that it depends on"
"""In a reason, before the runs of `slurm.after` are known."""
_REASONS = {
    "None": "",
    "Resources": "waiting for free nodes",
    "Priority": "waiting for higher-priority jobs",
    "Dependency": f"waiting for {AWAITED}",
    "BeginTime": "waiting for its start time, or delayed after a requeue",
    "JobHeldUser": "held by its owner; run `scontrol release` to release it",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held after too many requeues",
    "Licenses": "waiting for a license",
    "Reservation": "waiting for its reservation to start",
    "ReqNodeNotAvail": "required nodes are down, drained or reserved",
    "NodeDown": "a required node is down",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "FrontEndDown": "no node is available to run its batch script",
    "Cleaning": "its last attempt is being cleaned up",
    "Prolog": "its nodes are being prepared",
    "JobArrayTaskLimit": "its array is already running the maximum number of tasks",
    "JobLaunchFailure": (
        "a node could not launch the job; check that the node can access the run's folder and logs"
    ),
    "launch failed requeued held": "held because a node could not launch the job",
    "RaisedSignal": "terminated by a signal",
    "OutOfMemory": "a node used more memory than requested",
}
"""Sentences for Slurm's reasons; any other is shown as Slurm gives it.

https://slurm.schedmd.com/job_reason_codes.html
"""

_NEVER = {
    "DependencyNeverSatisfied": f"{AWAITED} did not end as required",
    "PartitionConfig": "its partition cannot provide the requested resources",
    "PartitionNodeLimit": "it requests more nodes than the partition allows",
    "PartitionTimeLimit": "its time limit exceeds the partition's",
    "BadConstraints": "no node satisfies its constraints",
    "AccountNotAllowed": "its account may not use the partition",
    "InvalidAccount": "its account does not exist",
    "InvalidQOS": "its quality of service does not exist",
    "QOSNotAllowed": "its quality of service is not allowed in the partition",
}
"""The same for reasons that do not pass by waiting: the job, or the site, must be changed."""
_PER_JOB = re.compile(r"(QOS|Assoc)(Max\w+PerJob(Limit)?|Min\w+)")
"""Limits of a single job, which other jobs that end do not lift."""

_LIMITS = (
    ("QOS", "a QOS limit has been reached"),
    ("Assoc", "an account limit has been reached"),
    ("MaxNodePerAccount", "an account limit has been reached"),
)
_NO_REASON = {"", "None", "NonZeroExitCode"}

_SQUEUE = "%i|%T|%S|%e|%D|%P|%Q|%r|%j|%Z"

_SCONTROL = re.compile(
    r"JobId=(?P<id>\d+) (?:ArrayJobId=(?P<array>\d+) ArrayTaskId=(?P<task>[\d,%-]+) )?"
    r"(?>.*?JobName=)(?P<name>\S+) UserId=(?>.*? JobState=)(?P<native>\S+)"
    r" Reason=(?>(?P<reason>.*?) Dependency=)(?>.*? Requeue=)(?P<requeue>\d)"
    r"(?>.*? ExitCode=)(?P<code>\d+:\d+)(?>.*? StartTime=)(?P<started>\S+)"
    r" EndTime=(?P<finished>\S+) "
)
"""Matches the first occurrence of each name only. Without the atomic groups (``?>``), the match
would try every combination for a comment that repeats the names."""

_SACCT = "JobID,State,ExitCode,Start,End,JobName"


def squeue_argv(name: str | None = None) -> list[str]:
    """The command that lists the user's active jobs, or with `name` all jobs of that name."""
    chosen = [f"--name={name}", "--states=all"] if name else []
    return ["squeue", "--me", "--noheader", *chosen, f"--format={_SQUEUE}"]


def parse_squeue(text: str) -> Iterator[Row]:
    """The jobs and array tasks in the output of `squeue_argv`; other lines are skipped."""
    count = _SQUEUE.count("|")
    for line in text.splitlines():
        parts = line.split("|", count)
        if len(parts) <= count:
            continue
        job, native, started, finished, nodes, partition, priority, reason, name, folder = parts
        row = Row(
            id=job,
            name=name,
            native=native,
            reason=reason,
            started=_time(started),
            finished=_time(finished),
            folder=folder,
            nodes=nodes,
            partition=partition,
            priority=whole(priority) or 0,
        )
        yield from (row._replace(id=task) for task in arrays.task_ids(job))


def scontrol_argv(ids: Sequence[str]) -> list[str]:
    """The command that shows jobs the controller knows, which includes those that ended recently.

    scontrol takes a single id; for several, the command shows all jobs. Of a task it shows the
    whole array.
    """
    selected = [ids[0].partition("_")[0]] if len(ids) == 1 else []
    return ["scontrol", "--oneliner", "show", "job", *selected]


def parse_scontrol(text: str) -> Iterator[Row]:
    """The jobs and array tasks in the output of `scontrol_argv`; other lines are skipped.

    Tasks of an array that wait share a line; once they have been cancelled, its task is 4294967294.
    """
    for line in text.splitlines():
        match = _SCONTROL.match(line)
        if match is None:
            continue
        row = Row(
            id=match["id"],
            name=match["name"],
            native=match["native"],
            reason=match["reason"],
            started=_time(match["started"]),
            finished=_time(match["finished"]),
            code=match["code"],
            requeued=match["requeue"] == "1",
        )
        array, tasks = match["array"], match["task"]
        job = f"{array}_{tasks if tasks.isdecimal() else f'[{tasks}]'}" if array else row.id
        yield from (row._replace(id=task) for task in arrays.task_ids(job))


def sacct_argv(ids: Sequence[str]) -> list[str]:
    """The command that shows jobs in the accounting database, where the site has one."""
    chosen = f"--jobs={','.join(ids)}"
    return ["sacct", "--allocations", "--noheader", "--parsable2", chosen, f"--format={_SACCT}"]


def parse_sacct(text: str) -> Iterator[Row]:
    """The jobs in the output of `sacct_argv`; other lines are skipped."""
    for line in text.splitlines():
        parts = line.split("|", 5)
        if len(parts) == len(_SACCT.split(",")):
            job, native, code, started, finished, name = parts
            state = native.partition(" ")[0]  # sacct prints "CANCELLED by 1000"
            yield Row(job, name, state, "", _time(started), _time(finished), code)


def elapsed_argv(job: str) -> list[str]:
    """The command that shows how long each attempt of a job has run."""
    chosen = ["--duplicates", f"--jobs={job}", "--format=JobID,ElapsedRaw"]
    return ["sacct", "--allocations", "--noheader", "--parsable2", *chosen]


def parse_elapsed(text: str, job: str) -> int | None:
    """The seconds of all attempts in the output of `elapsed_argv`; None where there are none."""
    rows = [line.partition("|") for line in text.splitlines()]
    seconds = [whole(raw) for name, _, raw in rows if name == job]
    known = [elapsed for elapsed in seconds if elapsed is not None]
    return sum(known) if known else None


def is_final(native: str) -> bool:
    """Whether a job in this state of Slurm's has ended."""
    return _STATES.get(native, State.UNKNOWN).final


def status(row: Row) -> Status:
    """The status of a job, from what Slurm alone knows."""
    state = _STATES.get(row.native, State.UNKNOWN)
    if row.native == "PENDING" and never_starts(row.reason):
        state = State.BLOCKED
    if row.native in _REQUEUEABLE and row.requeued:
        reason = f"{_STATE_REASONS[row.native]}; Slurm requeues it"
        return Status(State.QUEUED, row.native, reason)
    if state is State.UNKNOWN:
        return Status(state, row.native, f"unknown Slurm state {row.native}")
    reason = _reason(row)
    if not state.final:
        # the start time of a pending job is only an estimate
        started = None if row.native == "PENDING" else row.started
        return Status(state, row.native, reason, started=started)
    code = _EXIT_CODES.get(row.native, _exit_code(row.code))
    if (code == 0) is not (state is State.SUCCEEDED) or state is State.CANCELLED:
        code = None  # it is Slurm's own, not the trainer's
    never_started = row.native == "CANCELLED" and row.started == row.finished  # both are the end
    started = None if never_started else row.started
    return Status(state, row.native, reason, code, started, row.finished)


def _reason(row: Row) -> str:
    if row.queue_position:
        return row.queue_position
    if row.native == "CANCELLED" and row.reason.startswith("Depend"):
        return sentence("DependencyNeverSatisfied")  # Slurm itself cancels such a job
    return _STATE_REASONS.get(row.native) or sentence(row.reason)


def restarted(reasons: Sequence[str], state: State) -> str:
    """``restart 3 (time limit 2, preemption 1)``, in the tense that `state` calls for."""
    if not reasons:
        return ""
    count_by_reason = Counter(reason.replace("_", " ") for reason in reasons)
    listed = ", ".join(f"{reason} {count}" for reason, count in count_by_reason.items())
    if state.final:
        return f"after {plural(len(reasons), 'restart')} ({listed})"
    return f"restart {len(reasons)}{'' if state is State.RUNNING else ' pending'} ({listed})"


def never_starts(reason: str) -> bool:
    """Whether a pending job with this reason can only start if it, or the site, is changed."""
    code = _code(reason)
    return code in _NEVER or _PER_JOB.fullmatch(code) is not None


def was_rejected(row: Row) -> bool:
    """Whether sbatch refused the job: the controller keeps a record of it, as if it had failed."""
    return (row.native, row.reason) == ("FAILED", "BadConstraints")


def _code(reason: str) -> str:
    """The reason without the details that some have after a comma."""
    return reason.strip("()").replace("_", " ").partition(",")[0]


def sentence(reason: str) -> str:
    """What a reason of Slurm's means; empty for ``None`` and the like."""
    if reason in _NO_REASON:
        return ""
    # some reasons have details after a comma: ReqNodeNotAvail, UnavailableNodes:n1
    code, details = _code(reason), reason.strip("()").replace("_", " ").partition(",")[2]
    meaning = _NEVER.get(code) or _REASONS.get(code)
    if meaning is None:
        meaning = next((text for prefix, text in _LIMITS if code.startswith(prefix)), None)
        details = f"{code}{details}"
    if meaning is None:
        return f"Slurm gives the reason {reason}"
    meaning = f"{meaning} ({details.strip()})" if details.strip() else meaning
    return f"{meaning}, so it can never start" if never_starts(reason) else meaning


def _exit_code(text: str) -> int | None:
    """``7:0`` is 7, ``0:9`` is 137; None for Slurm's own codes (``0:53``)."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        return None
    code, number = int(match[1]), int(match[2])
    if code or not number:
        return code if code <= 255 else None  # noqa: PLR2004 - Slurm's own codes are larger
    return 128 + number if number <= signal.SIGSYS else None


def _time(text: str) -> datetime | None:
    """A time of Slurm's, made UTC by `client.query_environment`; None for ``N/A`` and the like."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return None


_IN_QUEUE = {"Resources", "Priority"}
_PENDING = "%i|%P|%Q"


class PendingJob(NamedTuple):
    """A pending job of any user; a pending job array counts as one job."""

    id: str
    partitions: frozenset[str]
    priority: int


def pending_argv() -> list[str]:
    """The command that lists the pending jobs of all users, as far as the site shows them."""
    return ["squeue", "--noheader", "--states=PENDING", f"--format={_PENDING}"]


def parse_pending(text: str) -> Iterator[PendingJob]:
    """The jobs in the output of `pending_argv`; other lines are skipped."""
    for line in text.splitlines():
        job, *rest = line.split("|")
        priority = whole(rest[-1]) if len(rest) == _PENDING.count("|") else None
        if priority is not None:
            yield PendingJob(job, frozenset(rest[0].split(",")), priority)


def has_position(row: Row) -> bool:
    """Whether the job waits for nodes or for jobs of higher priority, and for nothing else.

    A row of another command than squeue has no nodes and no partition to count jobs in.
    """
    return row.native == "PENDING" and row.reason in _IN_QUEUE and row.nodes != ""


class Queue:
    """The pending jobs of a cluster in their order: asked for each of many jobs, sorted once."""

    def __init__(self, pending: Iterable[PendingJob]) -> None:
        self._jobs = [(job.partitions, (-job.priority, _number(job.id))) for job in pending]
        self._orders: dict[frozenset[str], list[tuple[int, int]]] = {}

    def ahead(self, row: Row) -> int:
        """How many jobs of its partitions have a higher priority, or the same and a lower id."""
        partitions = frozenset(row.partition.split(","))
        if partitions not in self._orders:
            shared = (rank for own, rank in self._jobs if not partitions.isdisjoint(own))
            self._orders[partitions] = sorted(shared)
        return bisect_left(self._orders[partitions], (-row.priority, _number(row.id)))


def describe_position(row: Row, queue: Queue) -> str:
    """``waiting for 2 nodes in partition gpu; 14 jobs ahead; expected to start at ...``."""
    ahead = queue.ahead(row)
    nodes = f"{row.nodes} node{'' if row.nodes == '1' else 's'}"
    position = plural(ahead, "job") if ahead else "no jobs"
    start = f"; expected to start at {row.started:%Y-%m-%d %H:%M} UTC" if row.started else ""
    return f"waiting for {nodes} in partition {row.partition}; {position} ahead{start}"


def _number(job: str) -> int:
    """The number of a job, or of the array that it belongs to."""
    match = re.match(r"[0-9]+", job)
    return (whole(match[0]) or 0) if match else 0
