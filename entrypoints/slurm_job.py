"""What Slurm says of the job that this process is part of, and asking it for another attempt.

How a job looks while it is being ended was measured on Slurm 22.05: the state is COMPLETING
whatever the cause, so the cause is read from other fields. Fields and commands:
https://slurm.schedmd.com/scontrol.html
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cluster
from cluster import Environ
from restarts import NODE_FAILURE, PREEMPTION, REQUEST, TIME_LIMIT

_DUE_TO = re.compile(
    r"^slurmstepd\S* error: \*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ DUE TO ([A-Z ]+[A-Z])",
    re.MULTILINE,
)
_MARK = b" DUE TO "
_LONGEST = 1 << 16
"""Bytes of a line of a log that are looked at together."""
_CAUSES = {
    "PREEMPTION": PREEMPTION,
    "JOB REQUEUE": REQUEST,
    "NODE FAILURE": NODE_FAILURE,
    "TIME LIMIT": TIME_LIMIT,
}
"""The step daemon's words for the end of a job."""
_PATIENCE = 20.0
"""Seconds for one answer of the controller."""
_ASK_AGAIN = 2.0


@dataclass(frozen=True)
class Job:
    """The job at this moment."""

    state: str
    reason: str
    restarts: int
    nodes: tuple[str, ...]
    making_way: bool
    """It runs on borrowed time: a preemption with grace."""
    left: float
    """Seconds until its time limit; below 0 after it, infinite where it has none."""

    @property
    def timed_out(self) -> bool:
        return self.reason == "TimeLimit" or self.left <= 0


def look(env: Environ) -> Job | None:
    """The job as the controller sees it; None where it does not answer, or not in its words."""
    shown = _ask(["scontrol", "--oneliner", "show", "job", env["SLURM_JOB_ID"]])
    try:
        return parse(shown) if shown else None
    except cluster.LaunchError:
        return None


def parse(shown: str) -> Job:
    """A job out of one line of ``scontrol show job``. The first field of a name is Slurm's own.

    Raises LaunchError where its list of nodes is none.
    """
    values: dict[str, str] = {}
    for word in shown.split():
        name, _, value = word.partition("=")
        values.setdefault(name, value)
    restarts = values.get("Restarts", "")
    return Job(
        state=values.get("JobState", ""),
        reason=values.get("Reason", ""),
        restarts=int(restarts) if re.fullmatch(r"[0-9]{1,9}", restarts) else 0,
        nodes=tuple(cluster.expand(values.get("NodeList", "").replace("(null)", ""))),
        making_way=values.get("PreemptTime", "None") not in ("None", "(null)", ""),
        left=_seconds(values.get("TimeLimit", "")) - _seconds(values.get("RunTime", "0:0")),
    )


def requeue(env: Environ) -> str | None:
    """Put the job back into the queue. Returns what Slurm had against it, None when it did it.

    A controller that is being restarted is asked again for as long as Slurm lets this process be.
    """
    while True:
        try:
            done = _run(["scontrol", "requeue", env["SLURM_JOB_ID"]])
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 0 or "pending execution" in done.stderr:  # it is back already
            return None
        if not re.search(r"contact|timed out|Connection|communication", done.stderr):
            return done.stderr.strip()
        time.sleep(_ASK_AGAIN)


def cause(folder: Path, node: int, begun: Mapping[str, int]) -> str | None:
    """Why Slurm has ended the attempt, as its step daemon wrote into the logs of the run.

    `begun` is the size of each log when the attempt began. ``scontrol`` does not tell a preemption
    from a requeue by hand, and not every site keeps accounts.
    """
    found: list[str] = []
    for name in _logs(node):
        with contextlib.suppress(OSError), (folder / "logs" / name).open("rb") as file:
            file.seek(begun.get(name, 0))
            for line in iter(lambda: file.readline(_LONGEST), b""):
                found += _DUE_TO.findall(line.decode(errors="replace")) if _MARK in line else ()
    return next((_CAUSES[words] for words in reversed(found) if words in _CAUSES), None)


def log_sizes(folder: Path, node: int) -> dict[str, int]:
    """How long the logs are in which `cause` looks."""
    sizes = {}
    for name in _logs(node):
        with contextlib.suppress(OSError):
            sizes[name] = (folder / "logs" / name).stat().st_size
    return sizes


def _logs(node: int) -> tuple[str, ...]:
    """Of the batch script and of a node; the first one of an array's task lies beside the tasks."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    batch = "slurm.log" if task is None else f"../../../logs/slurm-{task}.log"
    return batch, f"node-{node}.log"


def _seconds(text: str) -> float:
    """``1-02:03:04`` in seconds; infinite for ``UNLIMITED`` and the like."""
    found = re.fullmatch(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,6}):(\d{1,6})", text)
    if found is None:
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _ask(argv: Sequence[str]) -> str:
    """What a command of Slurm's answers; nothing where it cannot be asked."""
    try:
        done = _run(argv)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command, without the user's own formats and filters (SQUEUE_FORMAT, ...)."""
    own = ("SQUEUE_", "SACCT_", "SCONTROL_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
