"""What Slurm says about jobs, read: commands out, text in. Asks nobody."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice

from deploykit.backends.slurm import arrays
from deploykit.decode import whole
from deploykit.model import State, Status


@dataclass(frozen=True)
class Row:
    """One job as Slurm described it."""

    id: str
    name: str
    native: str
    reason: str = ""
    started: datetime | None = None
    finished: datetime | None = None
    code: str = ""
    """Exit code and signal, ``1:0``."""
    folder: str = ""
    """Its working folder, where squeue was asked."""
    nodes: str = ""
    """How many it wants, as squeue prints it."""
    partition: str = ""
    """Its partition, or the ones that it may run in, with commas between."""
    priority: int = 0
    turn: str = ""
    """What is known of its turn, where it waits for that alone."""
    requeued: bool = False
    """Whether Slurm starts it again by itself after a preemption or a failed node."""


_STATES = {
    "PENDING": State.QUEUED,
    "CONFIGURING": State.QUEUED,
    "REQUEUED": State.QUEUED,
    "REQUEUE_HOLD": State.QUEUED,
    "REQUEUE_FED": State.QUEUED,
    "SPECIAL_EXIT": State.QUEUED,
    "RESV_DEL_HOLD": State.QUEUED,
    "RUNNING": State.RUNNING,
    "SUSPENDED": State.RUNNING,
    "STOPPED": State.RUNNING,
    "RESIZING": State.RUNNING,
    "SIGNALING": State.RUNNING,
    "STAGE_OUT": State.RUNNING,
    "COMPLETING": State.STOPPING,
    "COMPLETED": State.SUCCEEDED,
    "CANCELLED": State.CANCELLED,
    "REVOKED": State.CANCELLED,
    "FAILED": State.FAILED,
    "TIMEOUT": State.FAILED,
    "DEADLINE": State.FAILED,
    "OUT_OF_MEMORY": State.FAILED,
    "NODE_FAIL": State.FAILED,
    "PREEMPTED": State.FAILED,
    "BOOT_FAIL": State.FAILED,
    "LAUNCH_FAILED": State.FAILED,
    "RECONFIG_FAIL": State.FAILED,
}
"""Slurm's states in deploykit's words; one that is not here is UNKNOWN."""

_RETURNING = {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"}
"""States that are an end only where Slurm does not requeue the job."""

_WORDS = {
    "CONFIGURING": "its nodes are being made ready",
    "REQUEUED": "it was put back into the queue",
    "REQUEUE_HOLD": "it was put back into the queue and is held; `scontrol release` lets it go",
    "SPECIAL_EXIT": "it was put back into the queue and is held; `scontrol release` lets it go",
    "SUSPENDED": "suspended by Slurm; its processes stand still",
    "CANCELLED": "cancelled",
    "REVOKED": "moved to another cluster",
    "TIMEOUT": "stopped at its time limit; raise resources.time_limit",
    "DEADLINE": "it could not have ended before its deadline",
    "OUT_OF_MEMORY": "a node ran out of the memory asked for; raise resources.memory",
    "NODE_FAIL": "a node failed",
    "PREEMPTED": "preempted by a job of higher priority",
    "BOOT_FAIL": "a node did not boot",
    "LAUNCH_FAILED": "a node could not start it",
}
"""A sentence for a state that the trainer did not choose."""

_EXIT_CODES = {"TIMEOUT": 124, "OUT_OF_MEMORY": 137}
"""Where Slurm's own is no exit code of a program."""

_REASONS = {
    "None": "",
    "Resources": "waits for nodes to become free",
    "Priority": "other jobs of the partition go first",
    "Dependency": "waits for the job that it depends on",
    "DependencyNeverSatisfied": "the job that it depends on ended otherwise; this one never starts",
    "BeginTime": "its start time has not come, or it waits after a requeue",
    "JobHeldUser": "held by its owner; `scontrol release` lets it go",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held after too many requeues",
    "Licenses": "waits for a licence",
    "Reservation": "waits for its reservation to begin",
    "ReqNodeNotAvail": "nodes that it must have are down, drained or reserved",
    "NodeDown": "a node that it must have is down",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs now",
    "PartitionConfig": "the partition can never give it what it asks for",
    "PartitionNodeLimit": "asks for more nodes than the partition allows; it never starts",
    "PartitionTimeLimit": "its time limit is longer than the partition allows; it never starts",
    "BadConstraints": "no node has what it asks for; it never starts",
    "AccountNotAllowed": "its account may not use the partition",
    "InvalidAccount": "its account does not exist",
    "InvalidQOS": "its quality of service does not exist",
    "QOSNotAllowed": "its quality of service is not allowed here",
    "FrontEndDown": "no node can run its batch script now",
    "Cleaning": "its last attempt is being cleaned up",
    "Prolog": "its nodes are being made ready",
    "JobArrayTaskLimit": "as many tasks of its array run as may",
    "JobLaunchFailure": "a node could not start it: are the run's folder and its logs seen there?",
    "launch failed requeued held": "a node could not start it, and it is held",
    "RaisedSignal": "ended by a signal",
    "OutOfMemory": "a node ran out of the memory asked for",
}
"""Sentences for Slurm's reasons; one that is not here is shown as it is."""

_LIMITS = (
    ("QOS", "a limit of its quality of service is reached"),
    ("Assoc", "a limit of its account is reached"),
    ("MaxNodePerAccount", "a limit of its account is reached"),
)
_QUIET = {"", "None", "NonZeroExitCode"}

_LAST_SIGNAL = 31
_LAST_CODE = 255

_SQUEUE = "%i|%T|%S|%e|%D|%P|%Q|%r|%j|%Z"

_SCONTROL = re.compile(
    r"JobId=(?P<id>\d+) (?:ArrayJobId=(?P<array>\d+) ArrayTaskId=(?P<task>\d+) )?"
    r"(?>.*?JobName=)(?P<name>\S+) UserId=(?>.*? JobState=)(?P<native>\S+)"
    r" Reason=(?>(?P<reason>.*?) Dependency=)(?>.*? Requeue=)(?P<requeue>\d)"
    r"(?>.*? ExitCode=)(?P<code>\d+:\d+)(?>.*? StartTime=)(?P<started>\S+)"
    r" EndTime=(?P<finished>\S+) "
)
"""Each name where it stands first, and nowhere else: without `?>`, a job whose comment repeats
them would be tried in every combination."""
_SACCT = "JobID,State,ExitCode,Start,End,JobName"


def squeue_argv(name: str | None = None) -> list[str]:
    """Your jobs that have not ended; with `name`, those of that name, ended ones too."""
    chosen = [f"--name={name}", "--states=all"] if name else []
    return ["squeue", "--me", "--noheader", *chosen, f"--format={_SQUEUE}"]


def parse_squeue(text: str) -> Iterator[Row]:
    return islice(_queued(text), arrays.MOST)


def _queued(text: str) -> Iterator[Row]:
    count = _SQUEUE.count("|")
    for line in text.splitlines():
        parts = line.split("|", count)
        if len(parts) > count:
            job, native, started, finished, nodes, where, priority, reason, name, folder = parts
            row = Row(
                job,
                name,
                native,
                reason,
                _time(started),
                _time(finished),
                folder=folder,
                nodes=nodes,
                partition=where,
                priority=whole(priority) or 0,
            )
            yield from (replace(row, id=task) for task in arrays.tasks(job))


def scontrol_argv(ids: Sequence[str]) -> list[str]:
    """What the controller remembers, for some minutes after a job's end too.

    It takes one id or none, and none means all.
    """
    return ["scontrol", "--oneliner", "show", "job", *(ids if len(ids) == 1 else ())]


def parse_scontrol(text: str) -> Iterator[Row]:
    for line in text.splitlines():
        found = _SCONTROL.match(line)
        if found is not None:
            yield Row(
                f"{found['array']}_{found['task']}" if found["array"] else found["id"],
                found["name"],
                found["native"],
                found["reason"],
                _time(found["started"]),
                _time(found["finished"]),
                found["code"],
                requeued=found["requeue"] == "1",
            )


def sacct_argv(ids: Sequence[str]) -> list[str]:
    """What the accounting database keeps, where the site has one."""
    chosen = f"--jobs={','.join(ids)}"
    return ["sacct", "--allocations", "--noheader", "--parsable2", chosen, f"--format={_SACCT}"]


def parse_sacct(text: str) -> Iterator[Row]:
    for line in text.splitlines():
        parts = line.split("|", 5)
        if len(parts) == len(_SACCT.split(",")):
            job, native, code, started, finished, name = parts
            word = (native.split() or [""])[0]  # it also says "CANCELLED by 1000"
            yield Row(job, name, word, "", _time(started), _time(finished), code)


def is_final(native: str) -> bool:
    """Whether a job in that state has ended."""
    return _STATES.get(native, State.UNKNOWN).final


def status(row: Row) -> Status:
    """A job's status in deploykit's words."""
    state = _STATES.get(row.native, State.UNKNOWN)
    if row.native in _RETURNING and row.requeued:
        return Status(State.QUEUED, row.native, f"{_WORDS[row.native]}; Slurm starts it again")
    reason = row.turn or _why_cancelled(row) or _WORDS.get(row.native) or _sentence(row.reason)
    if state is State.UNKNOWN:
        return Status(state, row.native, f"Slurm calls it {row.native}")
    if not state.final:
        # the start of a job that waits is only Slurm's guess
        started = None if state is State.QUEUED else row.started
        return Status(state, row.native, reason, started=started)
    code = _EXIT_CODES.get(row.native, _exit_code(row.code))
    if (code == 0) is not (state is State.SUCCEEDED) or state is State.CANCELLED:
        code = None  # Slurm's own doing, and no word of the trainer's
    return Status(state, row.native, reason, code, row.started, row.finished)


def restarted(reasons: Sequence[str], state: State) -> str:
    """``restart 3 (time limit 2, preemption 1)``, and whether that is to come or was the last."""
    if not reasons:
        return ""
    counted = Counter(reason.replace("_", " ") for reason in reasons)
    listed = ", ".join(f"{reason} {count}" for reason, count in counted.items())
    number = len(reasons)
    if state.final:
        return f"after {number} restart{'s' if number > 1 else ''} ({listed})"
    return f"restart {number}{'' if state is State.RUNNING else ' to come'} ({listed})"


def _why_cancelled(row: Row) -> str:
    """Slurm itself cancels a job that can never start."""
    never = row.native == "CANCELLED" and row.reason.startswith("Depend")
    return _REASONS["DependencyNeverSatisfied"] if never else ""


def _sentence(reason: str) -> str:
    if reason in _QUIET:
        return ""
    # a reason may go on after a comma: ReqNodeNotAvail, UnavailableNodes:n1
    word, _, rest = reason.strip("()").replace("_", " ").partition(",")
    known = _REASONS.get(word)
    if known is None:
        known = next((text for start, text in _LIMITS if word.startswith(start)), None)
        rest = rest if known is None else f" {word}{rest}"
    if known is None:
        return f"Slurm says: {reason}"
    return f"{known} ({rest.strip()})" if rest.strip() else known


def _exit_code(text: str) -> int | None:
    """``7:0`` is 7, ``0:9`` is 137; Slurm's own codes (``0:53``) are none of a program."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        return None
    code, number = int(match[1]), int(match[2])
    if code or not number:
        return code if code <= _LAST_CODE else None
    return 128 + number if number <= _LAST_SIGNAL else None


def _time(text: str) -> datetime | None:
    """Slurm's time; it was asked to speak UTC."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return None


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the user's own filters and formats (SQUEUE_STATES, ...), and with times in UTC.

    The tasks of an array are written out (https://slurm.schedmd.com/squeue.html).
    """
    own = ("SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_TIME_FORMAT")
    kept = {name: value for name, value in environ.items() if not name.startswith(own)}
    return {**kept, "TZ": "UTC", "SLURM_BITSTR_LEN": "0"}
