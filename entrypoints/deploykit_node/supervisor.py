"""Run torchrun on this node: start it, deliver signals to its ranks, and end it in time."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploykit_node import records, signals
from deploykit_node.network.gathering import Gathering
from deploykit_node.restart.cap import KEEP, Cap

TICK = 0.2
"""Seconds between two checks of the ranks while the job is being stopped."""
LATE = 1.0
"""Seconds between two looks for ranks that have started since a notice."""
SLURM_FIRST = 0.3
"""Seconds left to Slurm to signal the ranks itself, so that they can tell our copy from Slurm's."""
GRACE = 30.0
"""Default seconds for the ranks to end after a signal to stop."""
STACKS = 10.0
"""Seconds for noting where the ranks are before they are told to stop, or a third of less grace."""
TORCHRUN_GRACE = 10.0
"""Seconds that torchrun gets to end its workers, after one has failed, before all are killed."""

TORCHRUN_STOP = signal.SIGHUP
"""The signal that makes torchrun stop its workers and exit."""
_HELD = (*signals.STOPS, *signals.NOTICES, signal.SIGCHLD)


@dataclass(frozen=True)
class Options:
    """How a node supervises its torchrun."""

    grace: float | None
    """Seconds for the ranks to end after a signal to stop, before they are killed. None: `GRACE`,
    or no limit for a signal from Slurm, which kills them itself."""
    say: Callable[[str], None]
    """Prints a line to the node's log."""
    on_signal: Callable[[int, float], None]
    """Called for each signal after the ranks have received it, with its time (`time.time`)."""
    cap: Cap | None = None
    """When the ranks must be told to stop, because the job has used up its cost cap."""
    on_cap: Callable[[], None] = lambda: None
    """Called when they are."""
    all_ended: Gathering | None = None
    """The nodes of which no rank is left, while the job ends otherwise than well."""
    look: Callable[[], int | None] | None = None
    """Called every `look_every` seconds. Returns SIGTERM or SIGKILL to end the ranks."""
    look_every: float | None = None
    before_stop: Callable[[float], None] = lambda _: None
    """Called before the ranks are told to stop, with the seconds that it may take."""


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    ranks: Path,
    options: Options,
    held: socket.socket | None = None,
) -> int:
    """Run torchrun to its end and return its code as `subprocess` reports it.

    Signals go to the ranks, which end by themselves; torchrun would kill them. `ranks` is the
    folder where the ranks register; torchrun inherits the socket `held`.
    """
    before = signals.hold(_HELD)
    process = subprocess.Popen(
        argv,
        env=env,
        start_new_session=True,
        pass_fds=[held.fileno()] if held else (),
        preexec_fn=_shielded(before),  # noqa: PLW1509 - the threads of this process hold no lock
    )
    if held:
        held.close()  # or the port would seem to answer after torchrun has ended
    supervisor = _Supervisor(process, env, ranks, options)
    supervisor.watch_cap()
    while process.poll() is None:
        if received := signals.wait(_HELD, supervisor.patience()):
            supervisor.handle(received)
        supervisor.tick()
    supervisor.kill_ranks()
    if process.returncode and options.all_ended:
        options.all_ended.arrive()  # the other nodes need not wait for the ranks of this one
    return process.returncode or 0


def _shielded(before: set[int]) -> Callable[[], None]:
    """The setup of the torchrun process: block SIGTERM, and let SIGHUP through.

    Slurm sends SIGTERM to every process of a step, twice for a preemption. torchrun would end its
    workers 30 seconds after the first one and abandon them at the second.
    """
    setup = signals.child_setup(before | {signal.SIGTERM}, TORCHRUN_STOP)

    def shielded() -> None:
        signal.signal(TORCHRUN_STOP, signal.SIG_DFL)
        setup()

    return shielded


class _Supervisor:
    """A running torchrun, and the deadlines for its end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        env: Mapping[str, str],
        ranks: Path,
        options: Options,
    ) -> None:
        self._process, self._env = process, env
        self._ranks, self._options = ranks, options
        self._stop: int | None = None
        """The signal to stop that the ranks have received."""
        self._leaving = False
        """Whether the ranks were told to make way for those of another group of nodes."""
        self._capped = False
        """Whether the ranks were told to stop because of the cost cap."""
        self._stopped: set[int] = set()
        """Process ids of the ranks that have received it."""
        self._notices: dict[int, set[int]] = {}
        """By notice: process ids of the ranks that have received it."""
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
        self._check_at = math.inf
        """When the cap, or the end of ranks that were told to stop, is checked next."""
        self._look_at = time.monotonic() + (options.look_every or math.inf)
        """When `Options.look` is called next."""

    def patience(self) -> float | None:
        """Seconds until `tick` has something to do, if no signal comes before."""
        due = min(self._check_at, self._look_at)
        return None if due == math.inf else max(0.0, due - time.monotonic())

    def handle(self, received: signals.Received) -> None:
        """Handle one signal."""
        if received.number != signal.SIGCHLD:
            self._forward(received)

    def tick(self) -> None:
        """Do what is due."""
        options = self._options
        if time.monotonic() >= self._check_at:
            self._check_at = math.inf
            self.watch_cap()
            if self._stop is not None:
                self._check_ranks()
                self._check_at = time.monotonic() + TICK
            elif self._notices:
                self._notify_late_ranks()
        if options.look and options.look_every and time.monotonic() >= self._look_at:
            if number := options.look():
                self._end(number)
            self._look_at = time.monotonic() + options.look_every

    def _end(self, number: int) -> None:
        """End the ranks: with SIGTERM, so that they can save, or with SIGKILL."""
        if number == signal.SIGKILL:
            self._kill_all()
        elif self._stop is None:
            self._leaving = True
            self._terminate(self._grace(slurm=False))

    def watch_cap(self) -> None:
        """Stop the ranks if the cost cap is near; else look again later."""
        cap = self._options.cap
        if cap is None:
            return
        cap.keep()
        left = cap.stop_at - time.monotonic()
        if left <= 0 and not self._capped:
            self._capped = True
            self._stop_at_cap(cap)
        elif self._stop is None:
            self._check_at = time.monotonic() + min(KEEP, max(left, TICK))

    def _stop_at_cap(self, cap: Cap) -> None:
        left = cap.end_at - TORCHRUN_GRACE - time.monotonic()
        self._options.before_stop(min(STACKS, max(0.0, left / 3)))
        count = self._terminate(max(0.0, cap.end_at - TORCHRUN_GRACE - time.monotonic()))
        self._options.say(f"the cost cap is near ({cap.text}): SIGTERM sent to {count}")
        self._options.on_cap()
        self._options.on_signal(signal.SIGTERM, time.time())

    def _terminate(self, grace: float) -> str:
        """Send SIGTERM to the ranks, which have `grace` seconds to end; how many there were."""
        pids = set(records.living(self._ranks).values()) - self._stopped
        for pid in pids:
            _send(os.kill, pid, signal.SIGTERM)
        self._stop = self._stop or signal.SIGTERM
        self._stopped |= pids
        self._stop_after(grace)
        return _count(pids)

    def _forward(self, received: signals.Received) -> None:
        received_at = time.time()
        slurm = signals.from_slurm(received.sender)
        grace = self._grace(slurm=slurm)
        if received.number in signals.STOPS and self._stop is None:
            begun = time.monotonic()
            self._options.before_stop(min(STACKS, grace / 3))
            grace = max(0.0, grace - (time.monotonic() - begun))
        if slurm:
            time.sleep(SLURM_FIRST)
        notice = received.number in signals.NOTICES
        pids = list(records.living(self._ranks).values())
        if notice:
            pids = [pid for pid in pids if signals.caught(pid, received.number)]
            self._notices[received.number] = set(pids)
            self._check_at = min(self._check_at, time.monotonic() + LATE)
        later = "; ranks that start later will receive it too" * notice
        self._options.say(
            f"{signals.name(received.number)} received and forwarded to {_count(pids)}{later}"
        )
        for pid in pids:
            _send(os.kill, pid, received.number)
        if received.number in signals.STOPS:
            self._stop = received.number
            self._stopped |= set(pids)
            started = pids or records.all_ended_well(self._ranks)
            self._stop_after(grace if started else 0)
        self._options.on_signal(received.number, received_at)

    def _notify_late_ranks(self) -> None:
        """Send the notices to ranks that have started since, once they do not ignore them."""
        for number, notified in self._notices.items():
            new = set(records.living(self._ranks).values()) - notified
            new = {pid for pid in new if signals.caught(pid, number)}
            for pid in new:
                _send(os.kill, pid, number)
            if new:
                self._options.say(
                    f"{signals.name(number)} forwarded to {_count(new)} that started later"
                )
            notified.update(new)
        self._check_at = min(self._check_at, time.monotonic() + LATE)

    def _grace(self, *, slurm: bool) -> float:
        if self._options.grace is not None:
            return self._options.grace
        return math.inf if slurm else GRACE

    def _stop_after(self, grace: float) -> None:
        """From now on check every `TICK` whether the ranks have ended or `grace` is over."""
        end = time.monotonic() + grace
        if self._terminate_at is None or end < self._terminate_at:
            self._terminate_at = end
            self._check_at = time.monotonic() + TICK

    def _check_ranks(self) -> None:
        now = time.monotonic()
        self._stop_restarted_ranks()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill()
        elif self._nothing_is_left():  # torchrun would wait for the other nodes
            _send(os.kill, self._process.pid, signal.SIGKILL)
        elif self._terminate_at is None:
            return
        elif now >= self._terminate_at and records.living(self._ranks):
            self._kill_at = now
            self._kill()
        elif now >= self._terminate_at or self._one_failed():
            self._kill_at = now + TORCHRUN_GRACE
            _send(os.kill, self._process.pid, TORCHRUN_STOP)

    def _nothing_is_left(self) -> bool:
        """Whether every rank has ended: of this node well, then on the others in any way."""
        if self._leaving and records.all_ended(self._ranks):
            return True
        gathering = self._options.all_ended
        if records.is_written(self._ranks):
            return False
        if gathering is None or not records.all_ended_well(self._ranks):
            return False
        gathering.arrive()
        return gathering.complete()

    def _stop_restarted_ranks(self) -> None:
        """Pass the signal on to ranks that torchrun has started in place of those that ended."""
        restarted = set(records.living(self._ranks).values()) - self._stopped
        if self._stop is not None:
            for pid in restarted:
                _send(os.kill, pid, self._stop)
        self._stopped |= restarted

    def _one_failed(self) -> bool:
        """Whether a rank failed: torchrun would restart it, or the others would wait for it."""
        return any(map(records.went_wrong, records.all_ranks(self._ranks)))

    def _kill(self) -> None:
        self._options.say("the ranks did not exit in time: sending SIGKILL")
        self._kill_all()

    def _kill_all(self) -> None:
        """Kill torchrun and the ranks."""
        _send(os.killpg, self._process.pid, signal.SIGKILL)
        self.kill_ranks()

    def kill_ranks(self) -> None:
        """Kill the ranks that torchrun has left behind; each leads its own process group."""
        for pid in records.living(self._ranks).values():
            _send(os.killpg, pid, signal.SIGKILL)


def _count(pids: Collection[int]) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{len(pids)} rank{'' if len(pids) == 1 else 's'}"


def _send(how: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        how(pid, number)
