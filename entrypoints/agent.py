"""torchrun on this node: started, sent signals on behalf of the job, and ended in time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ends
import signals

TICK = 0.2
"""Seconds between two looks at the ranks while the job is being stopped."""
SLURM_FIRST = 0.3
"""Seconds left to Slurm to reach the ranks itself, so that they can tell our copy from its."""
TORCHRUN_GRACE = 10.0
"""Seconds that torchrun gets to end its workers before all are killed."""

_HELD = (*signals.STOPS, *signals.NOTICES, signal.SIGCHLD, signal.SIGALRM)


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    workers: Path,
    *,
    grace: float,
    say: Callable[[str], None],
) -> int:
    """Run torchrun to its end and return its code, as `subprocess` says it.

    A signal is passed to the ranks, which find their own end; torchrun would kill them.
    `workers` is the folder where they register. What is left `grace` seconds after a signal
    that asks for the end is ended by force.
    """
    before = signals.hold(_HELD)
    process = subprocess.Popen(
        argv,
        env=env,
        start_new_session=True,
        preexec_fn=signals.child_setup(before, signal.SIGTERM),  # noqa: PLW1509 - no thread yet
    )
    agent = _Agent(process, workers, grace, say)
    while process.poll() is None:
        agent.take(signals.wait(_HELD))
    signal.setitimer(signal.ITIMER_REAL, 0)
    agent.sweep()
    return process.returncode


class _Agent:
    """What has been asked of a running torchrun, and what comes next."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        workers: Path,
        grace: float,
        say: Callable[[str], None],
    ) -> None:
        self._process = process
        self._workers = workers
        self._grace = grace
        self._say = say
        self._terminate_at: float | None = None
        self._kill_at: float | None = None

    def take(self, received: signals.Received) -> None:
        """Act on one signal."""
        if received.number == signal.SIGALRM:
            self._tick()
        elif received.number != signal.SIGCHLD:
            self._pass_on(received)

    def _pass_on(self, received: signals.Received) -> None:
        if signals.from_slurm(received.sender):
            time.sleep(SLURM_FIRST)
        ranks = ends.living(self._workers)
        told = f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}"
        self._say(f"{signals.name(received.number)} received and passed to {told}")
        for pid in ranks.values():
            _send(os.kill, pid, received.number)
        if received.number in signals.STOPS:
            self._stop(at_once=not ranks)

    def _stop(self, *, at_once: bool) -> None:
        """From now on look every `TICK`, until the ranks have ended or their time is over."""
        if self._terminate_at is None:
            self._terminate_at = time.monotonic() + (0 if at_once else self._grace)
            signal.setitimer(signal.ITIMER_REAL, TICK, TICK)

    def _tick(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill()
        elif self._terminate_at is not None and (now >= self._terminate_at or self._one_failed()):
            self._kill_at = now + TORCHRUN_GRACE
            _send(os.kill, self._process.pid, signal.SIGTERM)

    def _one_failed(self) -> bool:
        """A rank that ended with an error would be started again, or hold up the others."""
        return any(end["exit_code"] for end in ends.all_ranks(self._workers))

    def _kill(self) -> None:
        self._say("the ranks did not end in time: SIGKILL")
        _send(os.killpg, self._process.pid, signal.SIGKILL)
        self.sweep()

    def sweep(self) -> None:
        """Kill the ranks that torchrun has left behind; each leads a group of its own."""
        for pid in ends.living(self._workers).values():
            _send(os.killpg, pid, signal.SIGKILL)


def _send(how: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        how(pid, number)
