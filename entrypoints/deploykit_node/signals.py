"""Signals handled one at a time, each with its sender where the system reports it (Linux).

The process above each rank has this module and `rank`, and little else, in memory while the program
runs. So they import what is small, and the rest where it is used.
"""

# ruff: noqa: PTH123 - pathlib takes 1 MB

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import threading
    from collections.abc import Callable, Iterable
    from pathlib import Path
else:
    import _signal as signal  # without the enums of `signal`, which take 0.9 MB

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a process to stop."""

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that announce a time limit or a preemption. Ignored until the program has a handler."""

FORWARDED = (*STOPS, *NOTICES)
"""Signals that the program receives when the process above it does."""

LISTENING = 0.2
"""Seconds between two checks for a handler while a notice waits for the program to install one."""
SAME = 5.0
"""Seconds within which a signal from the launcher counts as the one that Slurm sent as well."""
BASE = 128
"""What a shell adds to the number of the signal that ended a process."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TIMER = signal.SIGALRM
"""The signal of `wait`'s own timer."""
_LEAST = 1e-6
"""Seconds: a timer of 0 never ends."""


class Received:
    """One signal. `sender` is a process id, or 0 for the kernel or an unknown sender."""

    def __init__(self, number: int, sender: int) -> None:
        self.number, self.sender = number, sender


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
        with open(status, encoding="ascii", errors="replace") as lines:
            digits = next((line.split()[1] for line in lines if line.startswith(f"{mask}:")), "0")
    except OSError:
        return None
    return bool(int(digits, 16) >> (number - 1) & 1)


def attend(
    pid: int,
    patience: Callable[[], float | None] = lambda: None,
    on_time: Callable[[], bool] = lambda: False,
) -> tuple[int, bool]:
    """Forward signals to a child until it has ended: its code, and whether one told it to stop.

    Call `hold` for `FORWARDED` and SIGCHLD before the child starts. A notice that comes before the
    program has a handler, while it loads its libraries, is kept until it has one. A signal that the
    sender has delivered to the program itself is not forwarded, unless the program has no handler:
    what kills it may come twice. `on_time` is called after `patience()` seconds at the latest, and
    returns whether it has told the program to stop.
    """
    torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    direct: dict[int, float] = {}
    early: set[int] = set()
    stopped = False
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        received = wait([*FORWARDED, signal.SIGCHLD], LISTENING if early else patience())
        for number in [number for number in early if caught(pid, number)]:
            early.remove(number)
            os.kill(pid, number)
        stopped = on_time() or stopped
        if received is None or received.number == signal.SIGCHLD:
            continue
        number, sender = received.number, received.sender
        reached = sender == torchrun > 0 or from_slurm(sender)
        stopped = stopped or number in STOPS
        if number in NOTICES and not caught(pid, number):
            early.add(number)
        elif reached and caught(pid, number):
            direct[number] = time.monotonic()
        elif time.monotonic() - direct.get(number, -SAME) >= SAME:
            os.kill(pid, number)
    return os.waitstatus_to_exitcode(ended[1]), stopped or is_pending(STOPS)


def exit_like(returncode: int) -> None:
    """End this process as a child ended, by the same signal if one killed it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if returncode < 0:
        _die_of(-returncode)
    os._exit(shell_code(returncode))


def child_setup(before: set[int], death: int, parent: int | None = None) -> Callable[[], None]:
    """A `preexec_fn` that sets the mask `before`, ignores notices, and ties the child to us.

    `death` is the signal that the child gets when this process, or else `parent`, dies for any
    reason.
    """
    parent, prctl = parent or os.getpid(), _prctl()

    def setup() -> None:
        ignore_notices()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(death))
            if os.getppid() != parent:
                os.kill(os.getpid(), death)

    return setup


def start_thread(target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread that gets no signals, which the main thread may not have blocked so far."""
    import threading

    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


def adopt_orphans() -> None:
    """From now on a process below this one whose parent ends becomes a child of this one."""
    prctl = _prctl()
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl() -> Callable[[int, int], int] | None:
    """The system call that Linux has for it."""
    if sys.platform != "linux":
        return None
    import ctypes

    return ctypes.CDLL(None).prctl


def from_slurm(sender: int) -> bool:
    """Whether `sender` is Slurm's step daemon, which may signal every process of a step."""
    try:
        with open(f"/proc/{sender}/comm", "rb") as comm:
            return comm.read() == b"slurmstepd\n"
    except OSError:
        return False


def name(number: int) -> str:
    """``SIGTERM`` for 15."""
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_code(returncode: int) -> int:
    """The exit code as a shell reports it: 128 + the signal for a process killed by a signal."""
    return returncode if returncode >= 0 else BASE - returncode


def _die_of(number: int) -> None:
    """Kill this process with the signal that killed its child, without a second core file."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
