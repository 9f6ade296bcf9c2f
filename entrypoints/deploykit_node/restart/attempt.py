"""One attempt of the job on this node: whether it may start, and what follows after its end.

Slurm restarts a job after a preemption without grace time and after a node failure. It does not
after the time limit, nor if the ranks end within the grace time of a preemption. Here the first
node that does not end with 0 decides for all nodes, and asks Slurm for another attempt if the job
file allows one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from deploykit_node import log, notify, records, signals
from deploykit_node.cluster import Cluster, Environ
from deploykit_node.network import alive, gathering
from deploykit_node.network.alive import Listener
from deploykit_node.network.gathering import Pause, is_written
from deploykit_node.records import STOPPED, AttemptRecord, ErrorRecord, NodeExit
from deploykit_node.restart import cap, checkpoints, decision, failure, slurm_job
from deploykit_node.restart.slurm_job import (
    ERROR,
    NODE_FAILURE,
    PREEMPTION,
    REQUEST,
    TIME_LIMIT,
    TRANSIENT,
)

_EARLY = 75.0
"""Seconds by which Slurm may send its notice early: it checks every 30, and its docs say 60."""
_ASKING = 2
"""Nodes that ask Slurm for the reason of a SIGTERM: the second in case the first is lost."""
_PAUSE = 0.2
_UNANSWERED = 60.0
"""Seconds to wait for a controller that does not answer, or for another node's decision."""


class Attempt:
    """The part of this node in an attempt.

    Outside of Slurm, and for a job that is never restarted, it only completes the exit reason.
    """

    def __init__(self, env: Environ, here: Cluster) -> None:
        self._env, self._here = env, here
        self._number = records.attempt(env)
        self._limits = slurm_job.restart_limits(env) if here.launcher == "slurm" else {}
        self._checkpoints = env.get("DEPLOYKIT_CHECKPOINT_DIR", "")
        self._at_start = checkpoints.snapshot(self._checkpoints)
        self._received: dict[int, float] = {}
        """When each signal came for the first time (`time.time`)."""
        self._run = Path(env.get("DEPLOYKIT_RUN_DIR", ""))
        self._records = self._run / records.FOLDER
        self._logs: dict[str, int] = {}
        self._heartbeat: Listener | None = None
        self.cap: cap.Cap | None = None
        """When this attempt has used up the job's cost cap; None without one."""
        self._capped, self._capped_file = False, self._records / f"capped-{self._number}"
        flag = self._decision(self._number)
        self._ended = gathering.gathering(env, "ended", here, flag) if self._limits else None
        self._recorded: NodeExit | None = None
        self.notifier = notify.Notifier(env)
        self._is_last = True
        """Whether this node knows that no other attempt follows."""
        self._lost: list[int] = []
        """Nodes whose launcher has disappeared."""
        self.missing: list[int] = []
        """Nodes for which a job has waited in vain that can do without some."""

    def begin(self) -> NodeExit | None:
        """Record the start. Returns the node's end if nothing may start any more.

        That is so where the cost cap is used up, or the job file allows no further restart.
        """
        end = self._begin()
        if end is None:
            self.notifier.begin(self._here)
        return end

    def _begin(self) -> NodeExit | None:
        self.cap = cap.begin(self._env, self._here.node)
        if self.cap and self.cap.used_up:
            self._capped = True
            return NodeExit(STOPPED, f"its cost cap is exhausted ({self.cap.text}); raise max_cost")
        if not self._limits:
            return None
        self._logs = slurm_job.log_sizes(self._run, self._here.node)
        if self._here.node == 0:
            return self._begin_on_first_node()
        if self._number:
            self._say(f"restart {self._number}")  # `logs --attempt` needs it in every node's log
        return None

    def _begin_on_first_node(self) -> NodeExit | None:
        path = self._records / "attempt.json"
        before = records.read(path) or {}
        if before.get("attempt") == self._number:
            return None  # this node was lost, and has come back
        self._complete_restart_records(before.get("logs", {}))
        record: AttemptRecord = {"attempt": self._number, "logs": self._logs}
        records.write(path, record)
        if not self._number:
            return None
        counted = slurm_job.restarts(self._env, self._number)
        self._say(f"restart {self._number} ({slurm_job.describe(counted)})")
        why = slurm_job.why_restarted(self._env, self._number) or NODE_FAILURE
        if counted[why] <= self._limits.get(why, counted[why]):
            return None
        reason = f"Slurm restarted the job, but {self._used_up(why)}; {self._how_to_resume()}"
        return NodeExit(STOPPED, reason)

    def _complete_restart_records(self, log_sizes: dict[str, int]) -> None:
        """Record the reasons of restarts that no process of their attempt could record.

        `log_sizes` is the size of each log when the previous attempt began.
        """
        for number in range(1, self._number + 1):
            # only a manual requeue restarts an attempt that had ended
            ended = self._decision(number - 1).exists()
            why = slurm_job.cause(self._run, 0, log_sizes)
            slurm_job.record_restart(self._env, number, why or (REQUEST if ended else NODE_FAILURE))

    def note_checkpoints(self) -> None:
        """Note what was restored since; only what is written later shows the program's progress."""
        self._at_start = checkpoints.snapshot(self._checkpoints)

    def regroup(self, group: Cluster) -> None:
        """From now on only the nodes of `group` train."""
        flag = self._decision(self._number)
        if self._limits:
            self._ended = gathering.gathering(self._env, "ended", group, flag)

    def start_heartbeat(self, address: str) -> None:
        """Show the other nodes that this one is alive, at its own `address`."""
        if self._limits and self._here.peer:
            self._heartbeat = alive.start(self._env, self._here.node, address)

    def on_signal(self, number: int, received_at: float) -> None:
        """Note a signal that the ranks have received, and why Slurm sent it."""
        self._received.setdefault(number, received_at)
        if self._limits and number in signals.STOPS and self._here.node < _ASKING:
            job = slurm_job.query(self._env)
            if job is not None and job.restarts > self._number:
                self._record_slurms_restart(job)

    def on_cap(self) -> None:
        """Note, for all nodes, that the job has used up its cost cap."""
        self._capped = True
        if self._limits:
            records.write_text(self._capped_file, "")

    @property
    def stop_signal(self) -> int | None:
        """The first signal to stop that was received."""
        return next((number for number in self._received if number in signals.STOPS), None)

    def settle(self, end: NodeExit) -> NodeExit:
        """Request another attempt if one is due. Returns the end with its full reason."""
        full = end._replace(reason=self._stop_reason(end)) if end.code == STOPPED else end
        if self._capped and self.cap and end.code:
            full = full._replace(reason=f"stopped at its cost cap ({self.cap.text}): {full.reason}")
        self.record(full)
        if end.code == 0:
            return end
        if not self._limits:
            stopped = end.code == STOPPED or self._capped
            return _extended(full, self._how_to_resume()) if stopped else end
        self._is_last = False  # unless this node decides so
        if end.code == STOPPED and self._ended:
            self._await(self._ended.complete, None)
            if self._ended.flagged:  # the decision is written
                return full
        decision = self._decision(self._number)
        if not _create(decision):
            pause = Pause.of(len(self._here.hosts))
            self._await(lambda: pause.over() and is_written(decision), _UNANSWERED)
            return full
        self._is_last = True
        full = self._decide(full)
        decision.write_text(full.reason + "\n")
        return full

    def root(self, ranks: Path) -> ErrorRecord | None:
        """Why the ranks failed, if the next attempt depends on it."""
        if not self._limits or decision.policy(self._env)[0] != "cause":
            return None
        return decision.root(self._env, ranks, alone=self._here.peer is None)

    def record(self, end: NodeExit) -> None:
        """Leave the exit record of this node, unless it says the same already."""
        if end != self._recorded:
            records.record_node(self._env, self._here.node, end)
        self._recorded = end
        if self._ended:
            self._ended.arrive()

    def notify_end(self, end: NodeExit) -> None:
        """Report the end of the run, unless another attempt follows, or another node decides.

        After a signal to stop, only the machine that submitted knows whether it was cancelled.
        """
        cancelled = self.stop_signal is not None and not (self._capped or self._noticed)
        if self._is_last and (not cancelled or not end.code):
            self.notifier.end(self._here, end, capped=self._capped)

    def _decision(self, attempt: int) -> Path:
        """The file whose creator decides what follows an attempt."""
        return self._records / f"decision-{attempt}"

    def _await(self, ready: Callable[[], bool], patience: float | None) -> None:
        """Wait until `ready`, for `patience` seconds, or until a stop signal is pending."""
        begun = time.monotonic()
        while not ready() and not signal.sigpending() & set(signals.STOPS):
            if patience is not None and time.monotonic() - begun > patience:
                return
            time.sleep(_PAUSE)

    def _decide(self, end: NodeExit) -> NodeExit:
        """Request another attempt if the job file allows it. Returns the end with the outcome."""
        if self._capped or self._capped_file.exists() or (self.cap and self.cap.used_up):
            return _extended(end, self._how_to_resume())
        job = self._query()
        if job is None:
            return _extended(end, "Slurm did not respond to a query about the job")
        if job.restarts > self._number:
            self._record_slurms_restart(job)
            self._is_last = False
            return _extended(end, "Slurm is restarting the job")
        why, end = self._cause(end, job)
        return end if why is None else self._follow(why, end, job)

    def _follow(self, why: str, end: NodeExit, job: slurm_job.Job) -> NodeExit:
        """Request another attempt after this one, which ended for the reason `why`, if it may."""
        error = None
        if why == ERROR and decision.policy(self._env)[0] == "cause":
            last = decision.last(self._env)
            if last and not last["restart"]:  # the reason says so already
                return _extended(end, self._how_to_resume())
            error = end.root or decision.of_exit(self._env, end)
            why = TRANSIENT if error["retry"] == failure.TRANSIENT else ERROR
        objection = self._objection(why, end)
        if objection is not None:
            wanted = why not in (ERROR, TRANSIENT) or self._limits.get(why)
            return _extended(end, f"{objection}; {self._how_to_resume()}") if wanted else end
        if error is None:
            decision.after_event(self._env, why, self._saved_since())
            return self._requeue(why, end, job)
        decided = decision.after_failure(self._env, error, self._saved_since())
        if not decided.restart:
            return _extended(end, f"{decided.why}; {self._how_to_resume()}")
        return self._requeue(why, _extended(end, decided.why), job, decided.wait)

    def _saved_since(self) -> str:
        """The newest checkpoint of this attempt since the last decision; empty without one."""
        last = decision.last(self._env)
        since = last["at"] if last else 0.0
        return checkpoints.newest(self._at_start, self._checkpoints, since) or ""

    def _query(self) -> slurm_job.Job | None:
        deadline = time.monotonic() + _UNANSWERED
        while (job := slurm_job.query(self._env)) is None and time.monotonic() < deadline:
            time.sleep(1)
        return job

    def _cause(self, end: NodeExit, job: slurm_job.Job) -> tuple[str | None, NodeExit]:
        """Why the attempt ended (None: on purpose), and the end with a corrected reason."""
        if end.code != STOPPED and not end.stopped:
            if not self._received and (lost := self._lost_nodes()):
                reason = f"node {lost[0]} no longer responds, and {end.reason}"
                return NODE_FAILURE, end._replace(reason=reason)
            return ERROR, end
        notice = float(self._env.get("DEPLOYKIT_NOTICE") or 0)  # seconds before the time limit
        if job.timed_out or (self._noticed and job.left <= notice + _EARLY):
            return TIME_LIMIT, end
        if job.preempted:
            return PREEMPTION, end
        if job.state != "COMPLETING" and (lost := self._lost_nodes()):
            name = f"node {lost[0]} ({self._here.hosts[lost[0]]})"
            reason = f"the launcher of {name} disappeared, as if killed by SIGKILL"
            return ERROR, NodeExit(137, reason)
        return self._cause_without_slurm(end, job), end

    def _cause_without_slurm(self, end: NodeExit, job: slurm_job.Job) -> str | None:
        """The cause if Slurm has none: a user's signal, or the program itself."""
        if job.state == "COMPLETING":
            return None  # cancelled
        if end.code == STOPPED and self._noticed:
            return REQUEST
        return None if self._received else ERROR

    def _lost_nodes(self) -> list[int]:
        if self.missing:
            return self.missing
        lost = alive.lost_nodes(self._env, self._here.node) if self._here.peer else []
        self._lost = lost
        hosts = {self._here.hosts[node]: "its launcher disappeared" for node in lost}
        records.record_unhealthy(self._env, hosts, failed_check=False)
        return lost

    @property
    def _noticed(self) -> bool:
        return signal.SIGUSR2 in self._received

    def _objection(self, why: str, end: NodeExit) -> str | None:
        """Why the job must not be restarted; None if it may be."""
        counted = slurm_job.restarts(self._env, self._number)
        if counted[why] >= self._limits.get(why, counted[why] + 1):
            return self._used_up(why)
        saved = end.code == STOPPED or checkpoints.newest(self._at_start, self._checkpoints)
        if why == TIME_LIMIT and not saved:
            return (
                f"not restarted: this attempt saved no checkpoint in {self._checkpoints}, so a "
                "retry would make no progress"
            )
        return None

    def _requeue(self, why: str, end: NodeExit, job: slurm_job.Job, wait: float = 0.0) -> NodeExit:
        """Ask Slurm for the next attempt. If it agrees, it now ends this one."""
        number, avoid = self._number + 1, slurm_job.dispensable(job, self._to_avoid(end))
        slurm_job.record_restart(self._env, number, why)
        error = slurm_job.requeue(self._env)
        if error is not None:
            slurm_job.withdraw_restart(self._env, number)
            return _extended(end, f"Slurm did not requeue the job: {error}")
        self._is_last = False
        adjusted = slurm_job.adjust(self._env, job, avoid, wait)
        counted = slurm_job.describe(slurm_job.restarts(self._env, number))
        return _extended(end, f"requeued{adjusted}: restart {number} ({counted})")

    def _to_avoid(self, end: NodeExit) -> list[str]:
        """The hosts that are at fault: those that were lost, or that of a broken GPU or link."""
        if self._lost:
            return [self._here.hosts[node] for node in self._lost]
        if end.root is None or end.root["label"] not in failure.BAD_NODE:
            return []
        node = end.root["rank"] // end.root["local_world_size"]
        return [self._here.hosts[node]] if node < len(self._here.hosts) else []

    def _record_slurms_restart(self, job: slurm_job.Job) -> None:
        """Record why Slurm itself restarts the job."""
        why = slurm_job.cause(self._run, self._here.node, self._logs)
        if set(job.nodes) != set(self._here.hosts):
            why = NODE_FAILURE  # Slurm has removed the failed node from the job's list
        slurm_job.record_restart(self._env, self._number + 1, why or PREEMPTION)

    def _stop_reason(self, end: NodeExit) -> str:
        """The reason for ranks that stopped with a checkpoint."""
        if not self._received:
            return f"{end.reason}, which means that it can resume, but it received no stop signal"
        first, received_at = next(iter(self._received.items()))
        saved = checkpoints.newest(self._at_start, self._checkpoints, received_at)
        folder = self._checkpoints or "its folder"
        what = f"saved {saved}" if saved else f"saved nothing new in {folder}"
        return f"after {signals.name(first)} the program {what} and exited with code {end.code}"

    def _used_up(self, why: str) -> str:
        limit = self._limits.get(why, 0)
        return f"slurm.restarts.{why} allows {limit or 'no'} restart{'' if limit == 1 else 's'}"

    def _how_to_resume(self) -> str:
        if not checkpoints.snapshot(self._checkpoints):
            return "there is no checkpoint to resume from"
        location = self._env.get("DEPLOYKIT_CHECKPOINT_BUCKET") or self._checkpoints
        return f"to resume, submit the job again with --set checkpoints={location}"

    def _say(self, text: str) -> None:
        log.say(self._here.node, text)


def _extended(end: NodeExit, more: str) -> NodeExit:
    return end._replace(reason=f"{end.reason}; {more}")


def _create(path: Path) -> bool:
    """Create an empty file. False if another node was first."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        return True
    return False
