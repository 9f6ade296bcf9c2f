"""Run a program and read what it prints, or write its command line for a person to paste.

No other module runs one, but for starting local jobs.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from deploykit.lib import paths, progress
from deploykit.lib.errors import BackendUnavailable

if TYPE_CHECKING:
    import socket

_MAX_OUTPUT = 256 << 20
"""Bytes that a program may print: `scontrol show job` of 100,000 jobs is 150 MB."""
_MAX_COMPLAINT = 2000
"""Bytes of an error message that `streamed` keeps."""
_PIECE = 1 << 16


class Programs:
    """The programs that some work has started; they are killed once it is abandoned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[Any]] = []
        self._is_abandoned = False

    def add(self, process: subprocess.Popen[Any]) -> None:
        with self._lock:
            self._running.append(process)
            if self._is_abandoned:
                process.kill()

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            for process in self._running:
                process.kill()  # no effect on one that has ended


programs: ContextVar[Programs | None] = ContextVar("programs", default=None)
"""Those of the work that `deadline.within` waits for, in the thread that does it."""


class Result(NamedTuple):
    """How a program ended and what it printed."""

    code: int
    out: str
    err: str


def run(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> Result:
    """Run `argv` to its end, whatever its exit code; `timeout` in seconds.

    Raises BackendUnavailable when the program is missing, does not answer in time, or prints more
    than 256 MiB.
    """
    code, out, err = raw(argv, cwd=cwd, env=env, timeout=timeout)
    return Result(code, out.decode(errors="replace"), err)


def raw(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    data: bytes | None = None,
) -> tuple[int, bytes, str]:
    """The same, with its output as bytes, and `data` as its standard input."""
    _require(argv[0], env.get("PATH") if env else None)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        list(argv),
        cwd=cwd,
        env=env,
        stdin=None if data is None else pipe,
        stdout=pipe,
        stderr=pipe,
    )
    if (known := programs.get()) is not None:
        known.add(process)
    with process:
        try:
            out, err = _talk(process, data or b"", time.monotonic() + timeout)
            code = process.wait()
        except TimeoutError as error:
            raise BackendUnavailable(
                f"{argv[0]} timed out after {timeout:g} s", hint="try again later"
            ) from error
        except OverflowError as error:
            raise BackendUnavailable(
                f"{argv[0]} printed more than {_MAX_OUTPUT >> 20} MiB"
            ) from error
        finally:
            process.kill()  # no effect on one that has ended
    return code, bytes(out), err.decode(errors="replace")


def _require(program: str, path: str | None) -> None:
    """Raise BackendUnavailable where a program is not on `path`, by default the process's."""
    if shutil.which(program, path=path) is None:
        raise BackendUnavailable(
            f"the program {program!r} is not on PATH", hint=f"install {program}, or add it to PATH"
        )


def streamed(
    argv: Sequence[str], stdin: IO[bytes], read: Callable[[IO[bytes]], None]
) -> tuple[int, str]:
    """Run a program without a time limit, and let `read` consume its standard output as it comes.

    `stdin` is a file on disk. Returns the exit code and the beginning of standard error. The
    program is killed if `read` raises.
    """
    _require(argv[0], None)
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            list(argv), stdin=stdin, stdout=subprocess.PIPE, stderr=complaints
        ) as process,
    ):
        try:
            read(cast(IO[bytes], process.stdout))
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        complaints.seek(0)
        return code, complaints.read(_MAX_COMPLAINT).decode(errors="replace").strip()


def serve(argv: Sequence[str], connection: socket.socket, begin: bytes) -> None:
    """Start a program that reads from a connection and writes to it, and do not wait for its end.

    What it prints before `begin` is left out: login nodes greet their users. What it complains of
    goes to this process's standard error.
    """
    _require(argv[0], None)
    process = subprocess.Popen(list(argv), stdin=connection.fileno(), stdout=subprocess.PIPE)
    arguments = (process, connection.dup(), begin)
    threading.Thread(target=_pass_on, args=arguments, daemon=True).start()


def _pass_on(process: subprocess.Popen[bytes], connection: socket.socket, begin: bytes) -> None:
    """Send what a program prints, from `begin` on, until it exits or the connection closes."""
    held = b""
    with process, connection, cast("IO[bytes]", process.stdout) as printed:
        while begin not in held and (piece := os.read(printed.fileno(), _PIECE)):
            held = held[-_PIECE:] + piece
        piece = b"".join(held.partition(begin)[1:])
        with contextlib.suppress(OSError):
            while piece:
                connection.sendall(piece)
                piece = os.read(printed.fileno(), _PIECE)


def has_person() -> bool:
    """Whether a person types the input of this process and reads its output."""
    return os.isatty(0) and os.isatty(1)


def become(argv: Sequence[str]) -> NoReturn:
    """Replace this process by `argv`, which takes over its terminal and ends with its own code.

    What is still buffered for standard output is lost. Raises BackendUnavailable when the program
    is missing.
    """
    _require(argv[0], None)
    os.execvp(argv[0], list(argv))  # noqa: S606 - no shell is the point


def command(*words: str | Path) -> str:
    """A command line of sh for this argument vector; a path in it is never read as an option."""
    return shlex.join(
        f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)
        for word in words
    )


def detach(argv: Sequence[str], log: Path) -> None:
    """Start a program that outlives this one; what it prints goes to the file `log`."""
    with open(log, "a", encoding="utf-8", opener=paths.private_opener) as file:
        subprocess.run(
            ["sh", "-c", '"$@" &', "sh", *argv],  # its parent is then none of ours
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            check=True,
        )


def _talk(
    process: subprocess.Popen[bytes], data: bytes, deadline: float
) -> tuple[bytearray, bytearray]:
    """Write `data` to a program, and read what it prints until it closes both streams.

    Raises TimeoutError after the deadline, OverflowError for more than `_MAX_OUTPUT` bytes.
    """
    streams = {process.stdout: bytearray(), process.stderr: bytearray()}
    rest = memoryview(data)
    with selectors.DefaultSelector() as watch:
        for stream in streams:
            watch.register(cast("IO[bytes]", stream), selectors.EVENT_READ)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            watch.register(process.stdin, selectors.EVENT_WRITE)
        while watch.get_map():
            ready = watch.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                stream = cast("IO[bytes]", key.fileobj)
                if stream is process.stdin:
                    rest = rest[_given(stream, rest) :]
                    more = len(rest) > 0
                    if progress.show is not None:
                        progress.show("sending", len(data) - len(rest), len(data))
                else:
                    more = _taken(stream, streams[stream])
                if not more:
                    watch.unregister(stream)
                    stream.close()
    return streams[process.stdout], streams[process.stderr]


def _given(stream: IO[bytes], data: memoryview) -> int:
    """The bytes of `data` that a program has read; all of them where it has closed its input."""
    try:
        return os.write(stream.fileno(), data[:_PIECE])
    except BrokenPipeError:
        return len(data)


def _taken(stream: IO[bytes], kept: bytearray) -> bool:
    """Append what a program has printed to `kept`; return whether there may be more."""
    piece = os.read(stream.fileno(), _PIECE)
    kept += piece
    if len(kept) > _MAX_OUTPUT:
        raise OverflowError
    return bool(piece)
