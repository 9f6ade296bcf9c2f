"""Signals handled one at a time, each with its sender where the system reports it (Linux)."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a process to stop."""

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that announce a time limit or a preemption. Ignored until the program has a handler."""

BASE = 128
"""What a shell adds to the number of the signal that ended a process."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TIMER = signal.SIGALRM
"""The signal of `wait`'s own timer."""
_LEAST = 1e-6
"""Seconds: a timer of 0 never ends."""


class Received(NamedTuple):
    """One signal. `sender` is a process id, or 0 for the kernel or an unknown sender."""

    number: int
    sender: int


def ignore_notices() -> None:
    """Ignore notices, which kill a process by default, until `hold` is called."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)


def hold(numbers: Iterable[int]) -> set[int]:
    """Block `numbers` so that `wait` can take them; returns the mask that a child needs back.

    A stop signal that was ignored from the start, as under nohup, stays ignored.
    """
    # macOS drops an ignored signal even while blocked
    for number in (*NOTICES, signal.SIGCHLD, _TIMER):
        signal.signal(number, lambda *_: None)
    wanted = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, [*wanted, _TIMER]))


def wait(numbers: Iterable[int], patience: float | None = None) -> Received | None:
    """The next of `numbers`, which `hold` has blocked; None after `patience` seconds.

    A timer's signal ends the wait, rather than `signal.sigtimedwait`: if a process is stopped and
    continued and its time has run out meanwhile, that returns a signal which nobody has sent
    (CPython 3.6 to 3.13 do not initialize what they return then).
    """
    if patience is None:
        return _take(numbers)
    signal.setitimer(signal.ITIMER_REAL, max(patience, _LEAST))
    received = _take([*numbers, _TIMER])
    signal.setitimer(signal.ITIMER_REAL, 0)
    if received.number == _TIMER:
        return None
    if is_pending([_TIMER]):  # the time ran out just after the signal
        _take([_TIMER])
    return received


def _take(numbers: Iterable[int]) -> Received:
    if not hasattr(signal, "sigwaitinfo"):  # macOS
        return Received(signal.sigwait(numbers), 0)
    info = signal.sigwaitinfo(numbers)
    return Received(info.si_signo, info.si_pid)


def is_pending(numbers: Iterable[int]) -> bool:
    """Whether one of `numbers`, which `hold` has blocked, waits to be taken."""
    return not signal.sigpending().isdisjoint(numbers)


def caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; True where the system does not tell."""
    return in_mask(f"/proc/{pid}/status", "SigCgt", number) is not False


def in_mask(status: Path | str, mask: str, number: int) -> bool | None:
    """Whether a signal is in a mask of a process or thread, by its ``/proc/PID/status``.

    None where that cannot be read: https://man7.org/linux/man-pages/man5/proc_pid_status.5.html
    """
    try:
        lines = Path(status).read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    digits = next((line.split()[1] for line in lines if line.startswith(f"{mask}:")), "0")
    return bool(int(digits, 16) >> (number - 1) & 1)


def child_setup(before: set[int], death: int) -> Callable[[], None]:
    """A `preexec_fn` that sets the mask `before`, ignores notices, and ties the child to us.

    `death` is the signal that the child gets when this process dies for any reason.
    """
    parent, prctl = os.getpid(), _prctl()

    def setup() -> None:
        ignore_notices()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(death))
            if os.getppid() != parent:
                os.kill(os.getpid(), death)

    return setup


def adopt_orphans() -> None:
    """From now on a process below this one whose parent ends becomes a child of this one."""
    prctl = _prctl()
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl() -> Callable[[int, int], int] | None:
    """The system call that Linux has for it."""
    if sys.platform != "linux":
        return None
    return ctypes.CDLL(None).prctl


def from_slurm(sender: int) -> bool:
    """Whether `sender` is Slurm's step daemon, which may signal every process of a step."""
    try:
        return Path(f"/proc/{sender}/comm").read_bytes() == b"slurmstepd\n"
    except OSError:
        return False


def name(number: int) -> str:
    """``SIGTERM`` for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_code(returncode: int) -> int:
    """The exit code as a shell reports it: 128 + the signal for a process killed by a signal."""
    return returncode if returncode >= 0 else BASE - returncode


def die_of(number: int) -> None:
    """Kill this process with the signal that killed its child, without a second core file."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
