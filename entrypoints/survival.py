"""What becomes of a job whose ranks have ended early.

Slurm brings a job back after a preemption without grace and after the loss of a node. It does not
after the time limit, nor where the ranks end within the grace of a preemption. Here the first
node that ends otherwise than well decides for all, asks Slurm for another attempt where the job
file allows one, and says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import beacon
import checkpoints
import ends
import restarts
import signals
import slurm_job
from cluster import Cluster, Environ
from ends import STOPPED, Node
from restarts import ERROR, NODE_FAILURE, PREEMPTION, REQUEST, TIME_LIMIT

_EARLY = 75.0
"""Seconds by which Slurm may give its notice early: it looks every 30, and the docs say 60."""
_ASKING = 2
"""Nodes that ask Slurm for the reason of a SIGTERM: the second one in case the first is lost."""
_PAUSE = 0.2
_UNANSWERED = 60.0
"""Seconds for a controller that does not answer, or for another node to decide."""


class Survival:
    """The part of one node in it."""

    def __init__(self, env: Environ, here: Cluster, say: Callable[[str], None]) -> None:
        self._env, self._here, self._say = env, here, say
        self._attempt = ends.attempt(env)
        self._limits = restarts.limits(env) if here.launcher == "slurm" else {}
        self._folder = env.get("DEPLOYKIT_CHECKPOINT_DIR", "")
        self._at_first = checkpoints.snapshot(self._folder)
        self._heard: dict[int, float] = {}
        self._run = Path(env.get("DEPLOYKIT_RUN_DIR", ""))
        self._logs: dict[str, int] = {}
        self._beacon: socket.socket | None = None

    def begin(self) -> Node | None:
        """The end of an attempt that Slurm has begun although the job file has had enough."""
        if not self._limits:
            return None
        self._logs = slurm_job.log_sizes(self._run, self._here.node)
        if self._here.node == 0:
            return self._begin_first()
        if self._attempt:
            self._say(f"restart {self._attempt}")  # `logs --attempt` looks for it on every node
        return None

    def _begin_first(self) -> Node | None:
        began = self._run / "ends" / "attempt.json"
        last = ends.read(began) or {}
        for number in range(1, self._attempt + 1):
            # where nobody was left to say why; an attempt that had ended was asked for again
            ended = self._decision(number - 1).exists()
            why = slurm_job.cause(self._run, 0, last.get("logs", {}))
            why = why or (REQUEST if ended else NODE_FAILURE)
            restarts.note(self._env, number, why)
        ends.write(began, {"attempt": self._attempt, "logs": self._logs})
        if not self._attempt:
            return None
        counted = restarts.counts(self._env, self._attempt)
        self._say(f"restart {self._attempt} ({restarts.words(counted)})")
        why = restarts.why(self._env, self._attempt) or NODE_FAILURE
        if counted[why] <= self._limits.get(why, counted[why]):
            return None
        return Node(STOPPED, f"Slurm started it again, and {self._used_up(why)}; {self._go_on()}")

    def shine(self, address: str) -> None:
        """Be seen to live by the other nodes, at this node's `address`."""
        if self._limits and self._here.peer:
            self._beacon = beacon.light(self._env, self._here.node, address)

    def hear(self, number: int, when: float) -> None:
        """A signal has been passed to the ranks. Where Slurm ends the attempt, write down why."""
        self._heard.setdefault(number, when)
        if self._limits and number in signals.STOPS and self._here.node < _ASKING:
            job = slurm_job.look(self._env)
            if job is not None and job.restarts > self._attempt:
                self._note_slurms(job)

    def settle(self, end: Node) -> Node:
        """See to another attempt where there can be one. The end as it is to be told."""
        told = end._replace(reason=self._told(end)) if end.code == STOPPED else end
        ends.record_node(self._env, self._here.node, told)
        if end.code == 0:
            return end
        if not self._limits:
            return self._add(told, self._go_on()) if end.code == STOPPED else end
        if end.code == STOPPED:
            self._await(lambda: len(ends.nodes(self._env)) == len(self._here.hosts), None)
        place = self._decision(self._attempt)
        if not _first(place):
            self._await(lambda: place.stat().st_size > 0, _UNANSWERED)
            return told
        told = self._decide(told)
        place.write_text(told.reason + "\n")
        return told

    def _decision(self, attempt: int) -> Path:
        """The file whose author decides about an attempt."""
        return self._run / "ends" / f"decision-{attempt}"

    def _await(self, ready: Callable[[], bool], patience: float | None) -> None:
        """Wait until `ready`, until Slurm wants an end (signals are held), or out of patience."""
        begun = time.monotonic()
        while not ready() and not signal.sigpending() & set(signals.STOPS):
            if patience is not None and time.monotonic() - begun > patience:
                return
            time.sleep(_PAUSE)

    def _decide(self, end: Node) -> Node:
        job = self._look()
        if job is None:
            return self._add(end, "Slurm did not say what becomes of the job")
        if job.restarts > self._attempt:
            self._note_slurms(job)
            return self._add(end, "Slurm starts it again")
        why, end = self._why(end, job)
        if why is None:
            return end
        against = self._against(why, end)
        if against is not None:
            asked = why != ERROR or self._limits.get(ERROR)
            return self._add(end, f"{against}; {self._go_on()}") if asked else end
        return self._again(why, end)

    def _look(self) -> slurm_job.Job | None:
        deadline = time.monotonic() + _UNANSWERED
        while (job := slurm_job.look(self._env)) is None and time.monotonic() < deadline:
            time.sleep(1)
        return job

    def _why(self, end: Node, job: slurm_job.Job) -> tuple[str | None, Node]:
        """The reason for which the job ended, None where it was meant to; and the truer end."""
        if end.code != STOPPED and not end.stopped:
            if not self._heard and (lost := self._lost()):
                gone = f"node {lost[0]} does not answer any more, and {end.reason}"
                return NODE_FAILURE, end._replace(reason=gone)
            return ERROR, end
        if job.timed_out or (self._noticed and job.left <= self._notice + _EARLY):
            return TIME_LIMIT, end
        if job.making_way:
            return PREEMPTION, end
        if job.state != "COMPLETING" and (lost := self._lost()):
            reason = f"the launcher of node {lost[0]} disappeared, as after SIGKILL"
            return ERROR, Node(137, reason)
        return self._asked(end, job), end

    def _asked(self, end: Node, job: slurm_job.Job) -> str | None:
        """The reason where Slurm has none: what somebody did by hand, or nobody."""
        if job.state == "COMPLETING":
            return None  # cancelled
        if end.code == STOPPED and self._noticed:
            return REQUEST
        return None if self._heard else ERROR

    def _lost(self) -> list[int]:
        """Other nodes that are gone without a word."""
        return beacon.dark(self._env, self._here.node) if self._here.peer else []

    @property
    def _noticed(self) -> bool:
        return signal.SIGUSR2 in self._heard

    @property
    def _notice(self) -> float:
        return float(self._env.get("DEPLOYKIT_NOTICE") or 0)

    def _against(self, why: str, end: Node) -> str | None:
        """What speaks against another attempt."""
        counted = restarts.counts(self._env, self._attempt)
        if counted[why] >= self._limits.get(why, counted[why] + 1):
            return self._used_up(why)
        fresh = end.code == STOPPED or checkpoints.newest(self._at_first, self._folder)
        if why == TIME_LIMIT and not fresh:
            return (
                "it is not started again, since this attempt has left no checkpoint in "
                f"{self._folder} and another one would come no further"
            )
        return None

    def _again(self, why: str, end: Node) -> Node:
        """Ask Slurm for the next attempt. From here on it ends this one."""
        number = self._attempt + 1
        restarts.note(self._env, number, why)
        complaint = slurm_job.requeue(self._env)
        if complaint is not None:
            restarts.withdraw(self._env, number)
            return self._add(end, f"Slurm did not put it back into the queue: {complaint}")
        counted = restarts.words(restarts.counts(self._env, number))
        return self._add(end, f"put back into the queue: restart {number} ({counted})")

    def _note_slurms(self, job: slurm_job.Job) -> None:
        """Write down why Slurm itself starts the job again."""
        why = slurm_job.cause(self._run, self._here.node, self._logs)
        if set(job.nodes) != set(self._here.hosts):
            why = NODE_FAILURE  # Slurm takes the node that failed off the job's list
        restarts.note(self._env, self._attempt + 1, why or PREEMPTION)

    def _told(self, end: Node) -> str:
        """A sentence for ranks that stopped in good order."""
        if not self._heard:
            return f"{end.reason}, which says that it can go on, though nobody had told it to stop"
        first, when = next(iter(self._heard.items()))
        saved = checkpoints.newest(self._at_first, self._folder, when)
        what = f"saved {saved}" if saved else f"left nothing new in {self._folder or 'its folder'}"
        return (
            f"told to stop by {signals.name(first)}, it {what} and ended with exit code {end.code}"
        )

    def _used_up(self, why: str) -> str:
        limit = self._limits.get(why, 0)
        return f"slurm.restarts.{why} allows {limit or 'no'} restart{'' if limit == 1 else 's'}"

    def _go_on(self) -> str:
        return f"to go on, submit it again with --set checkpoints={self._folder}"

    @staticmethod
    def _add(end: Node, more: str) -> Node:
        return end._replace(reason=f"{end.reason}; {more}")


def _first(place: Path) -> bool:
    """Whether this node is the first that comes to decide."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        return True
    return False
