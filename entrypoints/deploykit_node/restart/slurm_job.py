"""The Slurm job of this process: its state, why Slurm ends it, and a request to requeue it.

How a job looks while it is being ended was measured on Slurm 22.05: the state is COMPLETING
whatever the cause, so the cause is read from other fields. Fields and commands:
https://slurm.schedmd.com/scontrol.html

Why the job was restarted, and how often, is in one ``exit_records/restart-N.json`` per restart. The
first process that knows the reason writes it before the restart happens; no other overwrites it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploykit_node import cluster, records
from deploykit_node.cluster import Environ
from deploykit_node.log import now
from deploykit_node.records import RestartRecord

TIME_LIMIT, PREEMPTION, NODE_FAILURE = "time_limit", "preemption", "node_failure"
ERROR = "error"
TRANSIENT = "transient"
"""A rank failed for a transient reason: the network, the storage, another process."""
REQUEST = "request"
"""A user asked for it: `scontrol requeue`, or `scancel --signal=USR2`. No limit counts these."""

_DUE_TO = re.compile(
    r"^slurmstepd\S* error: \*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ DUE TO ([A-Z ]+[A-Z])",
    re.MULTILINE,
)
_MARK = b" DUE TO "
_LONGEST = 1 << 16
"""Bytes of a log line that are searched at once."""
_CAUSES = {
    "PREEMPTION": PREEMPTION,
    "JOB REQUEUE": REQUEST,
    "NODE FAILURE": NODE_FAILURE,
    "TIME LIMIT": TIME_LIMIT,
}
"""The step daemon's words for the end of a job."""
_PATIENCE = 20.0
"""Seconds for one answer of the controller."""
_RETRY_AFTER = 2.0


@dataclass(frozen=True)
class Job:
    """The job at this moment."""

    state: str
    reason: str
    restarts: int
    nodes: tuple[str, ...]
    preempted: bool
    """It runs in the grace time of a preemption."""
    left: float
    """Seconds until its time limit; below 0 after it, infinite without one."""
    ran: float = 0.0
    """Seconds since this attempt began."""
    partition: str = ""
    excluded: tuple[str, ...] = ()
    """The nodes that must not be used."""

    @property
    def timed_out(self) -> bool:
        """Whether the time limit is over."""
        return self.reason == "TimeLimit" or self.left <= 0


def query(env: Environ) -> Job | None:
    """The job as the controller sees it; None if the answer is missing or not understood."""
    output = _output(["scontrol", "--oneliner", "show", "job", env["SLURM_JOB_ID"]])
    try:
        return parse(output) if output else None
    except cluster.LaunchError:
        return None


def parse(line: str) -> Job:
    """The job in one line of ``scontrol show job``. The first field of a name is Slurm's own.

    Raises LaunchError if its node list is malformed.
    """
    values: dict[str, str] = {}
    for word in line.split():
        name, _, value = word.partition("=")
        values.setdefault(name, value)
    restarts, ran = values.get("Restarts", ""), _seconds(values.get("RunTime", "0:0"))
    return Job(
        state=values.get("JobState", ""),
        reason=values.get("Reason", ""),
        restarts=int(restarts) if re.fullmatch(r"[0-9]{1,9}", restarts) else 0,
        nodes=tuple(cluster.expand(values.get("NodeList", "").replace("(null)", ""))),
        partition=values.get("Partition", ""),
        excluded=tuple(cluster.expand(values.get("ExcNodeList", "").replace("(null)", ""))),
        preempted=values.get("PreemptTime", "None") not in ("None", "(null)", ""),
        left=_seconds(values.get("TimeLimit", "")) - ran,
        ran=0.0 if math.isinf(ran) else ran,
    )


def requeue(env: Environ) -> str | None:
    """Put the job back into the queue. Returns Slurm's error message, or None on success.

    Retries while the controller cannot be reached, for as long as Slurm lets this process live.
    """
    while True:
        try:
            done = _run(["scontrol", "requeue", env["SLURM_JOB_ID"]])
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 0 or "pending execution" in done.stderr:  # it is queued already
            return None
        if not re.search(r"contact|timed out|Connection|communication", done.stderr):
            return done.stderr.strip()
        time.sleep(_RETRY_AFTER)


def dispensable(job: Job, hosts: Sequence[str]) -> list[str]:
    """Those of the hosts, if the partition has enough nodes without them; else none."""
    if not hosts:
        return []
    shown = _output(["scontrol", "--oneliner", "show", "partition", job.partition])
    match = re.search(r"\bTotalNodes=([0-9]{1,9})\b", shown)
    size, excluded = int(match[1]) if match else 0, {*job.excluded, *hosts}
    return list(hosts) if size - len(excluded) >= len(job.nodes) else []


def adjust(env: Environ, job: Job, avoid: Sequence[str], wait: float) -> str:
    """Let the requeued job avoid hosts, and wait some seconds. Returns what was done, in words.

    Slurm may end this process at any moment.
    """
    changes, done = [], ""
    if avoid:
        changes.append(f"ExcNodeList={','.join(dict.fromkeys((*job.excluded, *avoid)))}")
        done += f" without {', '.join(avoid)}"
    if wait:
        changes.append(f"StartTime=now+{math.ceil(wait)}seconds")
        done += f" in {wait:g} s"
    if not changes:
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        argv = ["scontrol", "update", f"JobId={env['SLURM_JOB_ID']}", *changes]
        return done if _run(argv).returncode == 0 else ""
    return ""


def cause(folder: Path, node: int, begun: Mapping[str, int]) -> str | None:
    """Why Slurm has ended the attempt, from its step daemon's lines in the run's logs.

    `begun` is the size of each log when the attempt began. ``scontrol`` does not distinguish a
    preemption from a manual requeue, and not every site has accounting.
    """
    causes: list[str] = []
    for name in _logs(node):
        with contextlib.suppress(OSError), (folder / "logs" / name).open("rb") as file:
            file.seek(begun.get(name, 0))
            for line in iter(lambda: file.readline(_LONGEST), b""):
                causes += _DUE_TO.findall(line.decode(errors="replace")) if _MARK in line else ()
    return next((_CAUSES[words] for words in reversed(causes) if words in _CAUSES), None)


def log_sizes(folder: Path, node: int) -> dict[str, int]:
    """The size in bytes of each log that `cause` searches."""
    sizes = {}
    for name in _logs(node):
        with contextlib.suppress(OSError):
            sizes[name] = (folder / "logs" / name).stat().st_size
    return sizes


def _logs(node: int) -> tuple[str, ...]:
    """The logs of the batch script and of a node; an array's batch logs are beside its tasks."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    batch = "slurm.log" if task is None else f"../../../logs/slurm-{task}.log"
    return batch, f"node-{node}.log"


def _seconds(text: str) -> float:
    """``1-02:03:04`` in seconds; infinite for ``UNLIMITED`` and the like."""
    match = re.fullmatch(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,6}):(\d{1,6})", text)
    if match is None:
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _output(argv: Sequence[str]) -> str:
    """The output of a Slurm command; empty if it fails."""
    try:
        done = _run(argv)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command without the user's own formats and filters (SQUEUE_FORMAT, ...)."""
    settings = ("SQUEUE_", "SACCT_", "SCONTROL_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=_PATIENCE, check=False
    )


def restart_limits(env: Environ) -> dict[str, int]:
    """How often the job may be restarted, by reason; empty if it is never restarted."""
    values: dict[str, int] = json.loads(env.get("DEPLOYKIT_RESTARTS") or "{}")
    return values


def record_restart(env: Environ, number: int, why: str) -> None:
    """Record the reason for restart `number`, unless it is recorded already."""
    path = _restart_file(env, number)
    content: RestartRecord = {"restart": number, "why": why, "time": now()}
    records.write_first(path, content)


def withdraw_restart(env: Environ, number: int) -> None:
    """Delete the record of restart `number`, which does not happen."""
    _restart_file(env, number).unlink(missing_ok=True)


def why_restarted(env: Environ, number: int) -> str | None:
    """The reason for restart `number`, if one was recorded."""
    reason = (records.read(_restart_file(env, number)) or {}).get("why")
    return reason if isinstance(reason, str) else None


def restarts(env: Environ, upto: int) -> Counter[str]:
    """The number of restarts by reason, among restarts 1 to `upto`.

    A restart without a record counts as a node failure.
    """
    return Counter(why_restarted(env, number) or NODE_FAILURE for number in range(1, upto + 1))


def describe(counted: Counter[str]) -> str:
    """``time limit 2, preemption 1``."""
    return ", ".join(f"{why.replace('_', ' ')} {count}" for why, count in counted.items())


def _restart_file(env: Environ, number: int) -> Path:
    return Path(env["DEPLOYKIT_RUN_DIR"], records.FOLDER, f"restart-{number}.json")
