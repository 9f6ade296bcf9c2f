"""torchrun on this node: started, sent signals on behalf of the job, and ended in time."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ends
import signals

TICK = 0.2
"""Seconds between two looks at the ranks while the job is being stopped."""
SLURM_FIRST = 0.3
"""Seconds left to Slurm to reach the ranks itself, so that they can tell our copy from its."""
GRACE = 30.0
"""Seconds that ranks get after a signal that asks for the end, where nobody says otherwise."""
TORCHRUN_GRACE = 10.0
"""Seconds that torchrun gets to end its workers before all are killed."""

_END = signal.SIGHUP
"""The signal by which torchrun ends."""
_HELD = (*signals.STOPS, *signals.NOTICES, signal.SIGCHLD, signal.SIGALRM)


class Orders(NamedTuple):
    """What a node wants of its torchrun."""

    grace: float | None
    """Seconds for the ranks after a signal that asks for the end; then they are ended by force.
    None: `GRACE`, or as long as Slurm lets them where the signal is Slurm's."""
    say: Callable[[str], None]
    heard: Callable[[int, float], None]
    """Told of each signal, once the ranks have it, and of when it came (`time.time`)."""


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    workers: Path,
    orders: Orders,
    held: socket.socket | None = None,
) -> int:
    """Run torchrun to its end and return its code, as `subprocess` says it.

    A signal is passed to the ranks, which find their own end; torchrun would kill them.
    `workers` is the folder where they register. `held` is a socket that torchrun inherits.
    """
    before = signals.hold(_HELD)
    process = subprocess.Popen(
        argv,
        env=env,
        start_new_session=True,
        pass_fds=[held.fileno()] if held else (),
        preexec_fn=_shielded(before),  # noqa: PLW1509 - no thread yet
    )
    if held:
        held.close()  # or the port would seem to answer after torchrun has ended
    agent = _Agent(process, env, workers, orders)
    while process.poll() is None:
        if received := signals.wait(_HELD):
            agent.take(received)
    signal.setitimer(signal.ITIMER_REAL, 0)
    agent.sweep()
    return process.returncode


def _shielded(before: set[int]) -> Callable[[], None]:
    """What torchrun runs first: SIGTERM does not reach it, and SIGHUP always does.

    Slurm sends SIGTERM to every process of a step, twice for a preemption. torchrun would end its
    workers 30 seconds after the first one and leave them alone at the second.
    """
    setup = signals.child_setup(before | {signal.SIGTERM}, _END)

    def shielded() -> None:
        signal.signal(_END, signal.SIG_DFL)
        setup()

    return shielded


class _Agent:
    """What has been asked of a running torchrun, and what comes next."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        env: Mapping[str, str],
        workers: Path,
        orders: Orders,
    ) -> None:
        self._process, self._env = process, env
        self._workers, self._orders = workers, orders
        self._terminate_at: float | None = None
        self._kill_at: float | None = None

    def take(self, received: signals.Received) -> None:
        """Act on one signal."""
        if received.number == signal.SIGALRM:
            self._tick()
        elif received.number != signal.SIGCHLD:
            self._pass_on(received)

    def _pass_on(self, received: signals.Received) -> None:
        came = time.time()
        slurm = signals.from_slurm(received.sender)
        if slurm:
            time.sleep(SLURM_FIRST)
        ranks = ends.living(self._workers)
        told = f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}"
        self._orders.say(f"{signals.name(received.number)} received and passed to {told}")
        for pid in ranks.values():
            _send(os.kill, pid, received.number)
        if received.number in signals.STOPS:
            usual = math.inf if slurm else GRACE
            chosen = self._orders.grace
            waits = ranks or ends.all_well(self._workers)  # else they have not begun yet
            self._stop(0 if not waits else usual if chosen is None else chosen)
        self._orders.heard(received.number, came)

    def _stop(self, grace: float) -> None:
        """From now on look every `TICK`, until the ranks have ended or their time is over."""
        if self._terminate_at is None:
            self._terminate_at = time.monotonic() + grace
            signal.setitimer(signal.ITIMER_REAL, TICK, TICK)

    def _tick(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill()
        elif ends.all_everywhere(self._env):  # torchrun would take its time, and there is none
            _send(os.kill, self._process.pid, signal.SIGKILL)
        elif self._terminate_at is not None and (now >= self._terminate_at or self._one_failed()):
            self._kill_at = now + TORCHRUN_GRACE
            _send(os.kill, self._process.pid, _END)

    def _one_failed(self) -> bool:
        """A rank that ended with an error would be started again, or hold up the others."""
        return any(map(ends.went_wrong, ends.all_ranks(self._workers)))

    def _kill(self) -> None:
        self._orders.say("the ranks did not end in time: SIGKILL")
        _send(os.killpg, self._process.pid, signal.SIGKILL)
        self.sweep()

    def sweep(self) -> None:
        """Kill the ranks that torchrun has left behind; each leads a group of its own."""
        for pid in ends.living(self._workers).values():
            _send(os.killpg, pid, signal.SIGKILL)


def _send(how: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        how(pid, number)
