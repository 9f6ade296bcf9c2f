"""Run the user's program as a child process and relay its output line by line.

The relay is transparent: exact arguments, both output streams, signals, and the same exit. One
thread of the node's launcher copies the output of all ranks of the node. The process of a rank
starts the program, hands the pipes of its output over, forwards signals, and ends as it ended.

A progress bar returns to the start of its line, by a carriage return, and overwrites it many times
a second. Its last state is a line like any other. Of those before, one in `EVERY` seconds goes to
the log, marked by a carriage return before it. If the bar shows numbers such as ``loss=0.5``, from
which curves are drawn, states go to the log more often at the start of a run: all that come
`SOONEST` seconds apart, then about a thousand for each tenfold of the time. The current state of
rank 0 goes into a small file, which `deploykit` shows on a terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from deploykit_node import log, records, signals
from deploykit_node.restart.cap import Cap

PIPE = 1 << 20
"""Bytes that a pipe may hold, so that a program that prints much seldom waits: pipe(7)."""
PIECE = 64 * 1024
"""Bytes read at once."""
_AT_ONCE = 1 << 20
"""Bytes written to a file at once."""
LOG_LIMIT = 1 << 30
"""Bytes of a node's log where the job file sets no `log_limit`."""
END = 64 * 1024
"""Bytes that a program prints last, which are in the log in any case: they say why it failed."""
LAST = 16 * 1024
"""Bytes of each stream that are kept for the reason why its program failed."""
DRAIN = 3.0
"""Seconds that a grandchild may keep the output open after the program has ended."""
EVERY = 10.0
"""Seconds between two states of a bar in a log, at most."""
SOONEST = 0.05
"""Seconds between two states with numbers, at least; tqdm draws every 0.1 s."""
POINTS = 1000
"""A state with numbers is logged once the bar is older by one in so many parts."""
FRESH = 0.5
"""Seconds between two states in the file for terminals."""
LONGEST = 64 * 1024
"""Bytes of the longest unfinished line that is held back."""
NAME = "progress"
"""The file in the run folder."""
_DONE = b"100%"
_NUMBER = re.compile(rb"[A-Za-z_]\s?[=:]\s*(?:-?[\d.]+(?![\d.%])|nan|inf)")
"""A name and its number, but no share as in ``train: 45%``."""
_TRACEBACK = b"Traceback (most recent call last):"
_UP = re.compile(rb"\x1b\[\d*A\s*$")
"""Ends the state of a bar that is drawn below another one, as tqdm does with `position`."""
_INVISIBLE = re.compile(rb"\s|\x1b\[[0-9;]*[A-Za-z]")

_READS = 100
"""Pieces that are read of a program that has ended: more than its pipe holds."""
_ANSWER = 0.01
"""Seconds between two looks for the relay's answer."""
_SOCKET = "relay"
"""Where the relay of a node listens, in the folder of its ranks."""
_INFINITE = float("inf")


def command(program: Sequence[str], python: str | None = None) -> list[str]:
    """The argument vector for ``train.py a b`` or ``-m package.module a b``."""
    return [python or sys.executable, *program]


def run(
    argv: Sequence[str], env: Mapping[str, str], prefix: str, cap: Cap | None = None
) -> tuple[int, bool]:
    """Run `argv` to its end, relaying output and signals. Call it from the main thread.

    A UTC time and `prefix` go before each line. At its cost cap the program gets SIGTERM, and
    SIGKILL when the cap is used up. Returns its code as `subprocess` reports it, and whether a
    signal told it to stop.
    """
    before = signals.hold([*signals.FORWARDED, signal.SIGCHLD])
    process = subprocess.Popen(
        argv,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=signals.child_setup(  # noqa: PLW1509 - no thread yet
            before - {signal.SIGTERM},  # blocked by torchrun
            signal.SIGKILL,
        ),
    )
    assert process.stdout  # noqa: S101 - for mypy
    assert process.stderr  # noqa: S101 - for mypy
    relay, capped = Relay(env), _Capped(process.pid, cap)
    relay.add(
        prefix, env.get("RANK"), os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())
    )
    process.stdout.close()
    process.stderr.close()
    with relay.copying():
        process.returncode, stopped = signals.attend(process.pid, capped.patience, capped.on_time)
    return process.returncode, stopped


def hand_over(pipes: Sequence[int], folder: Path, rank: int) -> None:
    """Hand the output and the errors of the program of a rank over to the relay of its node."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, _short(folder) as short:
        sender.connect(f"{short}/{_SOCKET}")
        socket.send_fds(sender, [str(rank).encode()], pipes)


def last_output(folder: Path, rank: int) -> tuple[str, str, str]:
    """The ends of the errors and the output of a rank that has ended, and of another's output.

    Empty if the relay of its node does not answer.
    """
    answer = folder / f"rank-{rank}.last"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        with _short(folder) as short:
            sender.connect(f"{short}/{_SOCKET}")
        sender.send(str(rank).encode())
        deadline = time.monotonic() + DRAIN
        while time.monotonic() < deadline:
            if (last := records.read(answer)) is not None:
                answer.unlink()
                return last["errors"], last["output"], last["beside"]
            time.sleep(_ANSWER)
    return "", "", ""


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A short name of a folder: that of a socket may have only 107 bytes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}" if sys.platform == "linux" else str(folder)
    finally:
        os.close(descriptor)


class _Capped:
    """The cost cap of a program that is run without torchrun."""

    def __init__(self, pid: int, cap: Cap | None) -> None:
        self._pid, self._cap = pid, cap

    def patience(self) -> float | None:
        """Seconds until something must be done about the cap; None: nothing."""
        return None if self._cap is None else max(0.0, self._cap.stop_at - time.monotonic())

    def on_time(self) -> bool:
        """Tell the program to stop, or kill it, where it is time for that."""
        cap = self._cap
        if cap is None or time.monotonic() < cap.stop_at:
            return False
        if cap.end_at <= cap.stop_at:
            self._cap = None
            os.kill(self._pid, signal.SIGKILL)
        else:
            self._cap = cap.at_its_end()
            _write(2, f"{log.now()} the cost cap is near ({cap.text}): SIGTERM sent\n".encode())
            os.kill(self._pid, signal.SIGTERM)
        return True


class Relay:
    """A thread that copies the output of programs into the log of this process.

    With `folder`, that of the node's ranks, it takes what they hand over.
    """

    def __init__(self, env: Mapping[str, str], folder: Path | None = None) -> None:
        self._env, self._folder = env, folder
        self._limit = int(env.get("DEPLOYKIT_LOG_LIMIT", LOG_LIMIT))
        self._streams: dict[int, _Stream] = {}
        self._bars: set[_Stream] = set()
        """Those that have something to do although no data comes."""
        self._last: dict[str, dict[int, bytes]] = {}
        """By rank and sink: the ends of streams that have ended."""
        self._poll = select.poll()
        self._wake, self._closed = os.pipe()
        self._poll.register(self._wake, select.POLLIN)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if folder:
            with _short(folder) as short:
                self._listener.bind(f"{short}/{_SOCKET}")
            self._listener.setblocking(False)
            self._poll.register(self._listener, select.POLLIN)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copy meanwhile, and then what is left, for at most `DRAIN` seconds."""
        thread = signals.start_thread(self._copy)
        try:
            yield
        finally:
            os.close(self._closed)
            thread.join()
            os.close(self._wake)
            self._listener.close()

    def add(self, prefix: str, rank: str | None, output: int, errors: int) -> None:
        """Copy the output and the errors of one more program, whose lines begin with `prefix`."""
        bar = bar_file(self._env, rank)
        for sink, pipe in enumerate((output, errors), 1):
            if hasattr(fcntl, "F_SETPIPE_SZ"):
                with contextlib.suppress(OSError):  # the user's other pipes hold too much
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE)
            stream = _Stream(pipe, sink, prefix, bar, self._limit)
            stream.rank = rank or ""
            stream.heard = self._folder / f"rank-{rank}.heard" if self._folder else None
            self._streams[pipe] = stream
            self._poll.register(pipe, select.POLLIN)

    def _take(self) -> None:
        """Take the pipes that ranks have handed over, and tell those that ask what they printed."""
        with contextlib.suppress(BlockingIOError):
            while self._folder:
                rank, pipes, _, _ = socket.recv_fds(self._listener, 20, 2)
                number = rank.decode()
                if pipes:
                    self._last.pop(number, None)
                    self.add(f"[rank {number}]", number, *pipes)
                else:
                    self._tell(number, self._folder)

    def _tell(self, rank: str, folder: Path) -> None:
        """Write the last output of a rank, whose program has ended, and of another one's."""
        for stream in [one for one in self._streams.values() if one.rank == rank]:
            for _ in range(_READS):  # a process that it has left behind may go on printing
                ready = select.poll()
                ready.register(stream.source, select.POLLIN)
                if stream.source not in self._streams or not ready.poll(0):
                    break
                self._copy_from(stream)
        last = {number: dict(sinks) for number, sinks in self._last.items()}
        for stream in self._streams.values():
            last.setdefault(stream.rank, {})[stream.sink] = stream.last
        others = sorted((number for number in last if number != rank), key=int)
        own, beside = last.get(rank, {}), last[others[0]] if others else {}
        texts = {"errors": own.get(2), "output": own.get(1), "beside": beside.get(1)}
        record = {name: (text or b"").decode(errors="replace") for name, text in texts.items()}
        records.write(folder / f"rank-{rank}.last", record)

    def _copy(self) -> None:
        deadline = _INFINITE
        while (now := time.monotonic()) < deadline and (self._streams or deadline == _INFINITE):
            due = min([deadline, *(stream.due() for stream in self._bars)])
            for pipe, _ in self._poll.poll(None if due == _INFINITE else max(0, due - now) * 1000):
                if pipe == self._wake:
                    deadline = time.monotonic() + DRAIN
                    self._poll.unregister(pipe)
                    self._take()
                elif stream := self._streams.get(pipe):
                    self._copy_from(stream)
                else:
                    self._take()
            for stream in list(self._bars):
                stream.tick()
                if stream.due() == _INFINITE:
                    self._bars.remove(stream)
        for stream in [*self._streams.values()]:
            self._finish(stream)

    def _copy_from(self, stream: _Stream) -> None:
        if not stream.copy():
            self._finish(stream)
        elif stream.due() < _INFINITE:
            self._bars.add(stream)

    def _finish(self, stream: _Stream) -> None:
        stream.finish()
        self._last.setdefault(stream.rank, {})[stream.sink] = stream.last
        self._poll.unregister(stream.source)
        self._bars.discard(stream)
        del self._streams[stream.source]
        os.close(stream.source)


class _Stream:
    """One pipe of a program and the descriptor to which its lines go.

    If that is a file, as on this machine and with Slurm, lines are left out once it has `limit`
    bytes, but for the last ones of the program. Output changes the time of the file `heard`, at
    most once a second.
    """

    def __init__(self, source: int, sink: int, prefix: str, bar: Path | None, limit: int) -> None:
        self.source = source
        self.sink, self._prefix = sink, prefix
        self._is_file = stat.S_ISREG(os.fstat(sink).st_mode)
        self._most = _AT_ONCE if self._is_file else select.PIPE_BUF
        """A file takes all at its end, a pipe `PIPE_BUF` (pipe(7))."""
        self._lines = Lines(bar)
        self._limit = limit
        self._left_out = 0
        """Bytes since the file was full."""
        self._end = b""
        """The last ones of these."""
        self.rank = ""
        self.last = b""
        """The last `LAST` bytes of the program."""
        self.heard: Path | None = None
        self._heard_due = 0.0

    def due(self) -> float:
        """When `tick` has something to do, if no data comes before."""
        return self._lines.due()

    def copy(self) -> bool:
        """Relay what the pipe holds now. Returns whether more may come."""
        data, now = os.read(self.source, PIECE), time.monotonic()
        if self.heard and data and now >= self._heard_due:
            self._heard_due = now + 1
            with contextlib.suppress(OSError):
                self.heard.touch()
        self.last = (self.last + data)[-LAST:]
        text = self._lines.whole(data)
        if text is None:
            self._emit(self._lines.feed(data, now))
        else:
            self._log(text)
        return bool(data)

    def tick(self) -> None:
        """Relay the state of a progress bar, where it is due."""
        self._emit(self._lines.tick(time.monotonic()))

    def finish(self) -> None:
        """Relay a last line that has no newline, and the last lines of those left out."""
        self._emit(self._lines.finish())
        if self._left_out > len(self._end):
            size = self._left_out - len(self._end)
            _write(self.sink, self._stamped(b"%d bytes of output were left out here" % size))
        _write(self.sink, self._end)

    def _emit(self, lines: Iterable[bytes]) -> None:
        some = list(lines)
        if some:
            self._log(b"\n".join(some))

    def _log(self, text: bytes) -> None:
        """Write lines, the last one without its end, each after the time and the prefix."""
        text = self._stamped(text)
        if self._is_full(text):
            self._left_out += len(text)
            self._end += text
            if len(self._end) > END:
                self._end = self._end[self._end.find(b"\n", -END - 1) + 1 :]
            return
        for batch in _batches(text, self._most):
            _write(self.sink, batch)

    def _stamped(self, text: bytes) -> bytes:
        """Lines, the last one without its end, each after the time and the prefix."""
        start = f"{log.now()} {self._prefix} ".encode()
        return start + text.replace(b"\n", b"\n" + start) + b"\n"

    def _is_full(self, text: bytes) -> bool:
        """Whether the file takes no more; says so when that begins."""
        if self._left_out or not self._is_file:
            return self._left_out > 0
        if os.fstat(self.sink).st_size + len(text) <= self._limit:
            return False
        notice = f"log_limit reached ({self._limit} bytes on this node): dropping the rest"
        _write(self.sink, self._stamped(f"{notice} except its last {END >> 10} KiB".encode()))
        return True


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


def bar_file(env: Mapping[str, str], rank: str | None) -> Path | None:
    """The file for the bar of rank 0; None for other ranks, and where the run has no folder."""
    folder = env.get("DEPLOYKIT_RUN_DIR")
    return Path(folder, NAME) if folder and rank == "0" else None


class Lines:
    """Splits one stream of a program into lines and states of bars."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._rest = b""
        """The unfinished line: of a bar, its current state and what followed."""
        self._state = self._logged = self._shown = b""
        """The current state of a bar, empty where there is none; what was logged, and shown."""
        self._logged_at = self._shown_at = -EVERY
        self._began: float | None = None
        """When the first state was logged."""

    def whole(self, data: bytes) -> bytes | None:
        """The lines to log after `data`, joined: without a bar most output is taken at once.

        None where it has to be looked at line by line: `feed` it then.
        """
        end = data.rfind(b"\n")
        bars = self._state or self._shown or b"\r" in data or b"\r" in self._rest
        if end < 0 or bars or len(data) - end > LONGEST:
            return None
        text, self._rest = self._rest + data[:end], data[end + 1 :]
        return text

    def feed(self, data: bytes, now: float) -> Iterator[bytes]:
        """The lines to log after `data`, which was read at `now`, in seconds."""
        *ended, self._rest = (self._rest + data).split(b"\n")
        for line in ended:
            self._state = b""
            yield from self._end(line)
        yield from self._trim()
        while len(self._rest) > LONGEST:
            yield self._rest[:LONGEST].lstrip(b"\r")
            self._rest = self._rest[LONGEST:]
        yield from self.tick(now)

    def tick(self, now: float) -> Iterator[bytes]:
        """The state of the bar where it is due at `now`; also keeps the file current."""
        if self._state != self._shown and (not self._state or now >= self._shown_at + FRESH):
            self._shown, self._shown_at = self._state, now
            self._show()
        if now >= self._log_due():
            self._logged, self._logged_at = self._state, now
            self._began = now if self._began is None else self._began
            yield b"\r" + self._state

    def due(self) -> float:
        """When `tick` has something to do, if no data comes before."""
        waiting = [self._log_due()]
        if self._state != self._shown and self._file:
            waiting.append(self._shown_at + FRESH)
        return min(waiting)

    def _log_due(self) -> float:
        """When the state goes to the log: never if it is there, and sooner if it holds numbers."""
        if self._state in (b"", self._logged):
            return _INFINITE
        pause = EVERY
        if self._began is not None and _NUMBER.search(self._state):
            pause = min(EVERY, max(SOONEST, (self._logged_at - self._began) / POINTS))
        return self._logged_at + pause

    def finish(self) -> Iterator[bytes]:
        """The last line, which may be the last state of a bar."""
        last, self._rest, self._state = self._rest, b"", b""
        if last:
            yield from self._end(last)
        if self._state:
            yield self._state
        if self._shown:
            self._shown = self._state = b""
            self._show()

    def _end(self, line: bytes) -> Iterator[bytes]:
        """What to log of a whole line."""
        if b"\r" not in line[:-1]:  # at its end it is part of a line end
            yield line
            return
        wiped, segments = _wiped(line.split(b"\r"))
        yield from wiped
        last = next(filter(_is_visible, reversed(segments)), b"")
        if wiped and not last:
            return
        above = _UP.sub(b"", last)
        if above != last:
            self._state = above
            return
        before, traceback, after = last.partition(_TRACEBACK)
        if before and traceback and not after:  # it began behind a bar
            yield before
            last = traceback
        yield last

    def _trim(self) -> Iterator[bytes]:
        """Forget the overwritten states of an unfinished line; what to log of them."""
        if b"\r" not in self._rest[:-1]:  # at its end it may be part of a line end
            return
        wiped, segments = _wiped(self._rest.split(b"\r"))
        yield from wiped
        last = segments[-1]
        self._state = next(filter(_is_visible, reversed(segments)), b"")
        tail = b"" if last == self._state else b"\r" + last
        self._rest = b"\r" + self._state + tail

    def _show(self) -> None:
        """Write the state into the file. A reader takes an empty file for no news."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            if not self._state:
                self._file.unlink()
                return
            with open(self._file, "wb", opener=records.private) as file:
                file.write(self._state + b"\n")


def _wiped(segments: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The last states of bars that were complete when they were overwritten with blanks.

    Also the segments after the last of these.
    """
    states, rest = [], segments
    for number, (state, after) in enumerate(itertools.pairwise(segments)):
        if _DONE in state and after and not _is_visible(after):
            states.append(state)
            rest = segments[number + 2 :] or [b""]
    return states, rest


def _is_visible(text: bytes) -> bool:
    return bool(_INVISIBLE.sub(b"", text))
