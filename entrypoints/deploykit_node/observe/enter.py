"""A command beside a rank that runs: on its node, in its working folder, with its environment.

    launch.py --enter RUN_FOLDER RANK -- [COMMAND ARGS...]

Without a command a shell; with the command ``--debugger`` a connection to the debugger that the
rank waits for, on standard input and output. Ends as the command ends; 69 where the rank does not
run here.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

from deploykit_node import cluster, records
from deploykit_node.cluster import Environ
from deploykit_node.observe import hooks, processes

_UNAVAILABLE = 69
"""EX_UNAVAILABLE of sysexits.h."""
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""What shells exit with: https://pubs.opengroup.org/onlinepubs/9799919799/utilities/V3_chap02.html"""
_PATIENCE = 600.0
"""Seconds from the start of the program's process until it can wait: Python on a slow disk."""
_TICK = 0.1
_SIZE = b"Content-Length:"


def main(argv: Sequence[str], environ: Environ) -> NoReturn:
    """Become the command."""
    folder, number, _, *command = argv
    record = processes.here({**environ, "DEPLOYKIT_RUN_DIR": folder}).get(int(number))
    try:
        if record is None:
            raise ProcessLookupError
        env, cwd = _of_process(record["pid"])
    except (OSError, ValueError):
        name = cluster.host_name(environ)
        _fail(_UNAVAILABLE, f"rank {number} is no longer running on {name}")
    if command == ["--debugger"]:
        _relay(env)
        sys.exit(0)
    if "TERM" in environ:
        env["TERM"] = environ["TERM"]
    own = env.get("SHELL", "")
    command = command or [own if shutil.which(own) else shutil.which("bash") or "/bin/sh", "-i"]
    try:
        os.chdir(cwd)
        os.execvpe(command[0], command, env)  # noqa: S606 - no shell is the point
    except FileNotFoundError:
        _fail(_NOT_FOUND, f"{command[0]}: not found on this node")
    except OSError as error:
        _fail(_NOT_EXECUTABLE, f"{command[0]}: {error.strerror}")


def _of_process(pid: int) -> tuple[dict[str, str], str]:
    """The environment and the working folder of a process. Raises OSError where it has ended.

    https://man7.org/linux/man-pages/man5/proc_pid_environ.5.html
    """
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    env = hooks.without({name: value for name, _, value in pairs})
    return env, str(Path(f"/proc/{pid}/cwd").readlink())


def _fail(code: int, text: str) -> NoReturn:
    print(f"deploykit: {text}", file=sys.stderr, flush=True)
    sys.exit(code)


def _relay(env: Environ) -> None:
    """Connect standard input and output to the debugger of this node's rank, until one ends.

    The program waits for it in `debug_server.py`, at a port that only this machine has. Each answer
    gets a line feed at its end, since srun passes on whole lines only. An answer is a header with
    its size, and JSON: https://microsoft.github.io/debug-adapter-protocol/overview
    """
    with _connected(Path(env["DEPLOYKIT_RUN_DIR"], records.FOLDER, hooks.DEBUGGER)) as peer:
        threading.Thread(target=_send, args=(peer,), daemon=True).start()
        answers = peer.makefile("rb")
        while size := _size(answers):
            body = answers.read(size) + b"\n"
            sys.stdout.buffer.write(b"%s %d\r\n\r\n%s" % (_SIZE, len(body), body))
            sys.stdout.buffer.flush()


def _connected(file: Path) -> socket.socket:
    """A connection to the debugger, as soon as the program waits for it."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            port = (records.read(file) or {})["port"]
            return socket.create_connection(("127.0.0.1", port))
        except (KeyError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(_TICK)


def _size(answers: BinaryIO) -> int:
    """The size in the next header; 0 at the end."""
    size = 0
    while line := answers.readline().strip():
        if line.startswith(_SIZE):
            size = int(line.removeprefix(_SIZE))
    return size


def _send(peer: socket.socket) -> None:
    while piece := os.read(0, 1 << 16):
        peer.sendall(piece)
    peer.shutdown(socket.SHUT_WR)
