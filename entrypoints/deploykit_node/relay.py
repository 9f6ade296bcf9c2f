"""Run the user's program as a child process and relay its output line by line.

The relay is transparent: exact arguments, both output streams, signals, and the same exit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import selectors
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from deploykit_node import exit_records, log, progress, signals
from deploykit_node.cap import Cap

FORWARDED = (*signals.STOPS, *signals.NOTICES)
"""Signals that the program receives when the relay does."""
PIECE = 64 * 1024
"""Bytes read at once."""
_AT_ONCE = 1 << 20
"""Bytes written to a file at once."""
DRAIN = 3.0
"""Seconds that a grandchild may keep the output open after the program has ended."""
LISTENING = 0.2
"""Seconds between two checks for a handler while a notice waits for the program to install one."""
SAME = 5.0
"""Seconds within which a signal from the launcher counts as the one that Slurm sent as well."""


@dataclass(frozen=True)
class ChildExit:
    """How the program ended: the code of `subprocess`, and whether a signal asked it to stop."""

    returncode: int
    stopped: bool


@dataclass(frozen=True)
class Observer:
    """Who is told about a program: once, its process id; and whenever it has printed."""

    started: Callable[[int], None]
    heard: Callable[[], None]


def command(program: Sequence[str]) -> list[str]:
    """The argument vector for ``train.py a b`` or ``-m package.module a b``."""
    return [sys.executable, *program]


def run(
    argv: Sequence[str],
    env: dict[str, str],
    prefix: str,
    observer: Observer | None = None,
    cap: Cap | None = None,
) -> ChildExit:
    """Run `argv` to its end, relaying output and signals. Call it from the main thread.

    A UTC time and `prefix` go before each line; `progress` says what of a progress bar is a line.
    `observer` is told about the program. At its cost cap the program gets SIGTERM, and SIGKILL when
    the cap is used up.
    """
    before = signals.hold([*FORWARDED, signal.SIGCHLD]) - {signal.SIGTERM}  # blocked by torchrun
    child = subprocess.Popen(
        argv,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        preexec_fn=signals.child_setup(before, signal.SIGKILL),  # noqa: PLW1509 - no thread yet
    )
    wake, ended = os.pipe()
    heard = observer.heard if observer else None
    relay = threading.Thread(target=_relay, args=(_streams(child, env, prefix), wake, heard))
    relay.start()
    if observer is not None:
        observer.started(child.pid)
    stopped = _forward_until_end(child, cap)
    os.close(ended)
    relay.join()
    return ChildExit(child.returncode, stopped)


def exit_like(child: ChildExit) -> None:
    """End this process as the program ended, by the same signal if one killed it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if child.returncode < 0:
        signals.die_of(-child.returncode)
    os._exit(exit_records.shell_code(child.returncode))


def _forward_until_end(child: subprocess.Popen[bytes], cap: Cap | None) -> bool:
    """Forward signals until the child has ended. Returns whether one of them was a stop signal.

    A notice that comes before the program has a handler, while it loads its libraries, is kept
    until it has one. A signal that the sender has delivered to the program itself is not forwarded,
    unless the program has no handler: what kills it may come twice.
    """
    direct: dict[int, float] = {}
    early: set[int] = set()
    stopped = False
    while True:
        patience = LISTENING if early else _until(cap)
        received = signals.wait([*FORWARDED, signal.SIGCHLD], patience)
        for number in [number for number in early if signals.caught(child.pid, number)]:
            early.remove(number)
            child.send_signal(number)
        if cap is not None and time.monotonic() >= cap.stop_at:
            cap = _stop_at(cap, child)
            stopped = True
        if received is None:
            continue
        number, sender = received
        if number == signal.SIGCHLD:
            if child.poll() is not None:
                return stopped
            continue
        stopped = stopped or number in signals.STOPS
        if number in signals.NOTICES and not signals.caught(child.pid, number):
            early.add(number)
        elif _reached_child(sender) and signals.caught(child.pid, number):
            direct[number] = time.monotonic()
        elif time.monotonic() - direct.get(number, -SAME) >= SAME:
            child.send_signal(number)


def _until(cap: Cap | None) -> float | None:
    """Seconds until something must be done about the cap; None: nothing."""
    return None if cap is None else max(0.0, cap.stop_at - time.monotonic())


def _stop_at(cap: Cap, child: subprocess.Popen[bytes]) -> Cap | None:
    """Tell the program to stop, and return when it is killed; kill it where that has come."""
    if cap.end_at <= cap.stop_at:
        child.kill()
        return None
    _write(2, f"{log.now()} the cost cap is near ({cap.text}): SIGTERM sent\n".encode())
    child.terminate()
    return dataclasses.replace(cap, stop_at=cap.end_at)


def _reached_child(sender: int) -> bool:
    """Whether the sender signals whole process groups: torchrun, and on some clusters Slurm."""
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ and sender == os.getppid()
    return torchrun or signals.from_slurm(sender)


@dataclass
class _Stream:
    """One pipe of the child and the descriptor to which its lines go."""

    source: int
    sink: int
    prefix: str
    lines: progress.Lines
    most: int
    """Bytes that the sink takes at once without mixing them with those of other writers."""

    def copy(self) -> bool:
        """Relay what the pipe holds now. Returns whether more may come."""
        data = os.read(self.source, PIECE)
        text = self.lines.whole(data)
        if text is None:
            self._emit(self.lines.feed(data, time.monotonic()))
        else:
            self._log(text)
        return bool(data)

    def tick(self) -> None:
        """Relay the state of a progress bar, where it is due."""
        self._emit(self.lines.tick(time.monotonic()))

    def finish(self) -> None:
        """Relay a last line that has no newline."""
        self._emit(self.lines.finish())

    def _emit(self, lines: Iterable[bytes]) -> None:
        some = list(lines)
        if some:
            self._log(b"\n".join(some))

    def _log(self, text: bytes) -> None:
        """Write lines, the last one without its end, each after the time and the prefix."""
        start = f"{log.now()} {self.prefix} ".encode()
        text = start + text.replace(b"\n", b"\n" + start) + b"\n"
        for batch in _batches(text, self.most):
            _write(self.sink, batch)


def _streams(child: subprocess.Popen[bytes], env: dict[str, str], prefix: str) -> list[_Stream]:
    assert child.stdout is not None  # noqa: S101 - for type checkers
    assert child.stderr is not None  # noqa: S101 - for type checkers
    bar = progress.bar_file(env)
    pipes = ((child.stdout.fileno(), 1), (child.stderr.fileno(), 2))
    return [
        _Stream(source, sink, prefix, progress.Lines(bar), _most(sink)) for source, sink in pipes
    ]


def _relay(streams: list[_Stream], wake: int, heard: Callable[[], None] | None) -> None:
    """Copy until both pipes are closed, for at most `DRAIN` seconds after `wake` is closed."""
    deadline = float("inf")
    left = len(streams)
    with selectors.DefaultSelector() as selector:
        selector.register(wake, selectors.EVENT_READ)
        for stream in streams:
            selector.register(stream.source, selectors.EVENT_READ, stream)
        while left and (now := time.monotonic()) < deadline:
            due = min(deadline, *(stream.lines.due() for stream in streams))
            for key, _ in selector.select(None if due == float("inf") else max(0, due - now)):
                if key.data is None:
                    deadline = time.monotonic() + DRAIN
                    selector.unregister(wake)
                elif not key.data.copy():
                    selector.unregister(key.fd)
                    left -= 1
                elif heard is not None:
                    heard()
            for stream in streams:
                stream.tick()
    for stream in streams:
        stream.finish()


def _most(sink: int) -> int:
    """A file takes all at its end, a pipe `PIPE_BUF` (pipe(7))."""
    return _AT_ONCE if stat.S_ISREG(os.fstat(sink).st_mode) else select.PIPE_BUF


def _batches(text: bytes, most: int) -> Iterator[bytes]:
    """Whole lines, as many as fit into `most` bytes, or a single longer one."""
    start = 0
    while len(text) - start > most:
        end = text.rfind(b"\n", start, start + most) + 1 or text.find(b"\n", start) + 1
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _write(sink: int, data: bytes) -> None:
    """Write all of `data`. A log that is closed or full must not end the training."""
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(sink, data) :]
            except BlockingIOError:
                select.select([], [sink], [])
