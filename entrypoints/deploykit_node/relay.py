"""Run the user's program as a child process and relay its output line by line.

The relay is transparent: exact arguments, both output streams, signals, and the same exit.

Each rank has one while its program runs (`rank_relay`), so what is imported here at the top takes
memory of every rank: neither enums nor dataclasses, `typing`, `pathlib` or `subprocess`.
"""

from __future__ import annotations

import _thread
import os
import select
import stat
import sys
import time

from deploykit_node import log, progress, signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from deploykit_node.restart.cap import Cap

FORWARDED = (*signals.STOPS, *signals.NOTICES)
"""Signals that the program receives when the relay does."""
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
DRAIN = 3.0
"""Seconds that a grandchild may keep the output open after the program has ended."""
LISTENING = 0.2
"""Seconds between two checks for a handler while a notice waits for the program to install one."""
SAME = 5.0
"""Seconds within which a signal from the launcher counts as the one that Slurm sent as well."""


class ChildExit:
    """How the program ended: the code of `subprocess`, and whether a signal asked it to stop."""

    def __init__(self, returncode: int, *, stopped: bool) -> None:
        self.returncode = returncode
        self.stopped = stopped


class Child:
    """A program that `start` has started in this process, and the pipes of its output and errors.

    It stays its child if another program replaces this one (`rank_relay`).
    """

    def __init__(self, pid: int, output: int, errors: int, torchrun: int) -> None:
        self.pid, self.output, self.errors = pid, output, errors
        self.torchrun = torchrun
        """Process id of the torchrun above, which signals the program as well; 0 without one."""
        self._code: int | None = None

    def poll(self) -> int | None:
        """The code of `subprocess`; None while it runs."""
        if self._code is None:
            self._code = code_of(self.pid)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def code_of(pid: int) -> int | None:
    """The code of `subprocess` of a child of this process, which then is gone; None: it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def command(program: Sequence[str]) -> list[str]:
    """The argument vector for ``train.py a b`` or ``-m package.module a b``."""
    return [sys.executable, *program]


def run(
    argv: Sequence[str], env: Mapping[str, str], prefix: str, cap: Cap | None = None
) -> ChildExit:
    """Run `argv` to its end, relaying output and signals. Call it from the main thread.

    A UTC time and `prefix` go before each line; `progress` says what of a progress bar is a line.
    At its cost cap the program gets SIGTERM, and SIGKILL when the cap is used up.
    """
    return attend(start(argv, env), env, prefix, cap=cap)


def start(argv: Sequence[str], env: Mapping[str, str]) -> Child:
    """Start `argv`, whose output and signals this process has to relay from now on: `attend`."""
    import subprocess  # not beside the running program

    before = signals.hold([*FORWARDED, signals.CHILD]) - {signals.TERMINATE}  # blocked by torchrun
    (output, out), (errors, err) = _pipe(), _pipe()
    setup = signals.child_setup(before, signals.KILL)
    process = subprocess.Popen(
        argv,
        env=env,
        stdout=out,
        stderr=err,
        preexec_fn=setup,  # noqa: PLW1509 - no thread yet
    )
    process.returncode = 0  # `Child` waits for it
    os.close(out)
    os.close(err)
    torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    return Child(process.pid, output, errors, torchrun)


def _pipe() -> tuple[int, int]:
    """A pipe that holds much, unless the user's pipes hold as much as the system allows."""
    import fcntl

    source, sink = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        try:
            fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, PIPE)
        except OSError:
            pass
    return source, sink


def attend(
    child: Child,
    env: Mapping[str, str],
    prefix: str,
    heard: Callable[[], None] | None = None,
    cap: Cap | None = None,
) -> ChildExit:
    """Relay the program to its end, as `run`; `heard` is called whenever it has printed."""
    signals.hold([*FORWARDED, signals.CHILD])
    bar = progress.bar_file(env)
    limit = int(env.get("DEPLOYKIT_LOG_LIMIT", LOG_LIMIT))
    pipes = (child.output, child.errors)
    streams = [_Stream(pipe, sink, prefix, bar, limit) for sink, pipe in enumerate(pipes, 1)]
    wake, ended = os.pipe()
    copied = _thread.allocate_lock()
    copied.acquire()
    _thread.start_new_thread(_relay, (streams, wake, heard, copied))
    code, stopped = _forward_until_end(child, cap)
    os.close(ended)
    copied.acquire()
    return ChildExit(code, stopped=stopped)


def exit_like(child: ChildExit) -> None:
    """End this process as the program ended, by the same signal if one killed it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if child.returncode < 0:
        signals.die_of(-child.returncode)
    os._exit(signals.shell_code(child.returncode))


def _forward_until_end(child: Child, cap: Cap | None) -> tuple[int, bool]:
    """Forward signals until the child has ended. Returns its code, and whether one told it to stop.

    A notice that comes before the program has a handler, while it loads its libraries, is kept
    until it has one. A signal that the sender has delivered to the program itself is not forwarded,
    unless the program has no handler: what kills it may come twice.
    """
    direct: dict[int, float] = {}
    early: set[int] = set()
    stopped = False
    while (code := child.poll()) is None:
        patience = LISTENING if early else _until(cap)
        received = signals.wait([*FORWARDED, signals.CHILD], patience)
        for number in [number for number in early if signals.caught(child.pid, number)]:
            early.remove(number)
            child.send_signal(number)
        if cap is not None and time.monotonic() >= cap.stop_at:
            cap = _stop_at(cap, child)
            stopped = True
        if received is None or received.number == signals.CHILD:
            continue
        number, sender = received.number, received.sender
        stopped = stopped or number in signals.STOPS
        if number in signals.NOTICES and not signals.caught(child.pid, number):
            early.add(number)
        elif _reached(child, sender) and signals.caught(child.pid, number):
            direct[number] = time.monotonic()
        elif time.monotonic() - direct.get(number, -SAME) >= SAME:
            child.send_signal(number)
    return code, stopped or signals.is_pending(signals.STOPS)


def _until(cap: Cap | None) -> float | None:
    """Seconds until something must be done about the cap; None: nothing."""
    return None if cap is None else max(0.0, cap.stop_at - time.monotonic())


def _stop_at(cap: Cap, child: Child) -> Cap | None:
    """Tell the program to stop, and return when it is killed; kill it where that has come."""
    if cap.end_at <= cap.stop_at:
        child.send_signal(signals.KILL)
        return None
    _write(2, f"{log.now()} the cost cap is near ({cap.text}): SIGTERM sent\n".encode())
    child.send_signal(signals.TERMINATE)
    return cap.at_its_end()


def _reached(child: Child, sender: int) -> bool:
    """Whether the sender signals whole process groups: torchrun, and on some clusters Slurm."""
    return sender == child.torchrun > 0 or signals.from_slurm(sender)


class _Stream:
    """One pipe of the child and the descriptor to which its lines go.

    If that is a file, as on this machine and with Slurm, lines are left out once it has `limit`
    bytes, but for the last ones of the program.
    """

    def __init__(self, source: int, sink: int, prefix: str, bar: str | None, limit: int) -> None:
        self.source = source
        self._sink, self._prefix = sink, prefix
        self._is_file = stat.S_ISREG(os.fstat(sink).st_mode)
        self._most = _AT_ONCE if self._is_file else select.PIPE_BUF
        """A file takes all at its end, a pipe `PIPE_BUF` (pipe(7))."""
        self._lines = progress.Lines(bar)
        self._limit = limit
        self._left_out = 0
        """Bytes since the file was full."""
        self._end = b""
        """The last ones of these."""

    def due(self) -> float:
        """When `tick` has something to do, if no data comes before."""
        return self._lines.due()

    def copy(self) -> bool:
        """Relay what the pipe holds now. Returns whether more may come."""
        data = os.read(self.source, PIECE)
        text = self._lines.whole(data)
        if text is None:
            self._emit(self._lines.feed(data, time.monotonic()))
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
            _write(self._sink, self._stamped(b"%d bytes of output were left out here" % size))
        _write(self._sink, self._end)

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
            _write(self._sink, batch)

    def _stamped(self, text: bytes) -> bytes:
        """Lines, the last one without its end, each after the time and the prefix."""
        start = f"{log.now()} {self._prefix} ".encode()
        return start + text.replace(b"\n", b"\n" + start) + b"\n"

    def _is_full(self, text: bytes) -> bool:
        """Whether the file takes no more; says so when that begins."""
        if self._left_out or not self._is_file:
            return self._left_out > 0
        if os.fstat(self._sink).st_size + len(text) <= self._limit:
            return False
        notice = f"log_limit is reached ({self._limit} bytes on this node): the rest is left out"
        _write(self._sink, self._stamped(f"{notice}, but for its last {END >> 10} KiB".encode()))
        return True


def _relay(
    streams: Sequence[_Stream],
    wake: int,
    heard: Callable[[], None] | None,
    copied: _thread.LockType,
) -> None:
    """Copy until both pipes are closed, for at most `DRAIN` seconds after `wake` is closed.

    Releases `copied` then.
    """
    deadline = float("inf")
    stream_by_pipe = {stream.source: stream for stream in streams}
    poll = select.poll()
    for pipe in (wake, *stream_by_pipe):
        poll.register(pipe, select.POLLIN)
    while stream_by_pipe and (now := time.monotonic()) < deadline:
        due = min(deadline, *(stream.due() for stream in streams))
        for pipe, _ in poll.poll(None if due == float("inf") else max(0, due - now) * 1000):
            if pipe == wake:
                deadline = time.monotonic() + DRAIN
                poll.unregister(wake)
            elif not stream_by_pipe[pipe].copy():
                poll.unregister(pipe)
                del stream_by_pipe[pipe]
            elif heard is not None:
                heard()
        for stream in streams:
            stream.tick()
    for stream in streams:
        stream.finish()
    copied.release()


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
    try:
        while data:
            try:
                data = data[os.write(sink, data) :]
            except BlockingIOError:
                select.select([], [sink], [])
    except OSError:
        pass
