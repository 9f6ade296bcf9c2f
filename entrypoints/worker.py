"""One rank: the user's program as a child process, its output relayed line by line.

The relay is transparent: exact arguments, both streams, signals, and the same end.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ends
import signals

FORWARDED = (*signals.STOPS, *signals.NOTICES)
PIECE = 64 * 1024
"""Bytes read at once, and the longest unfinished line that is held back."""
DRAIN = 3.0
"""Seconds that a grandchild may keep the output open after the program has ended."""
LISTENING = 0.2
"""Seconds between two looks whether the program listens to a notice that came too early."""
SAME = 5.0
"""Seconds within which the same signal from the launcher is the one that Slurm sent too."""


@dataclass(frozen=True)
class End:
    """How the program ended: as `subprocess` says it, and whether it had been told to."""

    returncode: int
    stopped: bool


def command(program: Sequence[str]) -> list[str]:
    """The argument vector for ``train.py a b`` or ``-m package.module a b``."""
    return [sys.executable, *program]


def run(argv: Sequence[str], env: dict[str, str], prefix: str) -> End:
    """Run `argv` to its end, relaying output and signals. Call it from the main thread."""
    before = signals.hold([*FORWARDED, signal.SIGCHLD]) - {signal.SIGTERM}  # kept from torchrun
    child = subprocess.Popen(
        argv,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        preexec_fn=signals.child_setup(before, signal.SIGKILL),  # noqa: PLW1509 - no thread yet
    )
    wake, ended = os.pipe()
    relay = threading.Thread(target=_relay, args=(_streams(child, prefix), wake))
    relay.start()
    stopped = _forward_until_end(child)
    os.close(ended)
    relay.join()
    return End(child.returncode, stopped)


def leave(end: End) -> None:
    """End this process as the program ended, so that whoever is above sees the same."""
    sys.stdout.flush()
    sys.stderr.flush()
    if end.returncode < 0:
        signals.die_of(-end.returncode)
    os._exit(ends.shell_code(end.returncode))


def _forward_until_end(child: subprocess.Popen[bytes]) -> bool:
    """Pass signals on until the child has ended. Returns whether one of them asked for that.

    A notice that comes before the program listens, while it loads its libraries, is kept for it.
    What came before there was a program did not reach it; what ends it at once may come twice.
    """
    direct: dict[int, float] = {}
    early: set[int] = set()
    stopped = False
    while True:
        received = signals.wait([*FORWARDED, signal.SIGCHLD], LISTENING if early else None)
        for number in [number for number in early if signals.caught(child.pid, number)]:
            early.remove(number)
            child.send_signal(number)
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


def _reached_child(sender: int) -> bool:
    """Whether the sender signals whole groups: torchrun, and on some clusters Slurm."""
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ and sender == os.getppid()
    return torchrun or signals.from_slurm(sender)


@dataclass
class _Stream:
    """One pipe of the child and where its lines go."""

    source: int
    sink: int
    prefix: str
    rest: bytes = b""

    def copy(self) -> bool:
        """Relay what the pipe holds now. Returns whether more may come."""
        data = os.read(self.source, PIECE)
        *lines, self.rest = (self.rest + data).split(b"\n")
        while len(self.rest) > PIECE:
            lines.append(self.rest[:PIECE])
            self.rest = self.rest[PIECE:]
        self._emit(lines)
        return bool(data)

    def finish(self) -> None:
        """Relay a last line without its newline."""
        self._emit([self.rest] if self.rest else [])
        self.rest = b""

    def _emit(self, lines: list[bytes]) -> None:
        start = f"{ends.now()} {self.prefix} ".encode()
        for batch in _batches(start + line + b"\n" for line in lines):
            _write(self.sink, batch)


def _streams(child: subprocess.Popen[bytes], prefix: str) -> list[_Stream]:
    assert child.stdout is not None  # noqa: S101 - for type checkers
    assert child.stderr is not None  # noqa: S101 - for type checkers
    return [_Stream(child.stdout.fileno(), 1, prefix), _Stream(child.stderr.fileno(), 2, prefix)]


def _relay(streams: list[_Stream], wake: int) -> None:
    """Copy until both pipes are closed; at most `DRAIN` seconds once `wake` is closed."""
    deadline = float("inf")
    left = len(streams)
    with selectors.DefaultSelector() as selector:
        selector.register(wake, selectors.EVENT_READ)
        for stream in streams:
            selector.register(stream.source, selectors.EVENT_READ, stream)
        while left and (patience := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(None if patience == float("inf") else patience):
                if key.data is None:
                    deadline = time.monotonic() + DRAIN
                    selector.unregister(wake)
                elif not key.data.copy():
                    selector.unregister(key.fd)
                    left -= 1
    for stream in streams:
        stream.finish()


def _batches(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines together, as many as a pipe takes without mixing in another writer's."""
    batch = b""
    for line in lines:
        if batch and len(batch) + len(line) > select.PIPE_BUF:
            yield batch
            batch = b""
        batch += line
    if batch:
        yield batch


def _write(sink: int, data: bytes) -> None:
    """Write all of `data`. A log that is gone or full must not end the training."""
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(sink, data) :]
            except BlockingIOError:
                select.select([], [sink], [])
