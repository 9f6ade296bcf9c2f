"""A process without torchrun: of a job of one rank, or a plain one on each node (`plain`).

It is a fork of the launcher: to start a single process, torchrun would load PyTorch. The program of
one rank finds torchrun's variables, and where MASTER_ADDR and MASTER_PORT say a
store: the launcher listens there, on loopback alone, and starts the store (`network.elastic`) when
something connects, which few programs of one rank do.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable

from deploykit_node import LAUNCH, plain, rank, signals
from deploykit_node.cluster import Environ
from deploykit_node.command import Command

_LOOPBACK = "127.0.0.1"
_OPTIONS = {"--nnodes=1", "--nproc-per-node=1", "--max-restarts=0"}
_FIRST, _LAST = 3, 1024
"""File descriptors that the fork closes: it has those of the standard streams."""


def is_one(words: Command) -> bool:
    """Whether torchrun would start one process, once."""
    return bool(words.options) and not words.plain and _OPTIONS.issuperset(words.options)


class Store:
    """The port of the job's store, and its server once it is needed."""

    def __init__(self) -> None:
        self._listener = socket.create_server((_LOOPBACK, 0))
        self._wake, self._ended = os.pipe()
        self._server: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def close(self) -> None:
        """End the server, if there is one."""
        os.close(self._ended)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake)
        self._listener.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def variables(self, name: str) -> Environ:
        """What torchrun would set for the rank of a job with this name."""
        return {
            **dict.fromkeys(plain.ZERO, "0"),
            **dict.fromkeys(plain.ONE, "1"),
            "ROLE_NAME": "default",
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(self._listener.getsockname()[1]),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": name,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def serve(self) -> None:
        """From now on start the server as soon as something connects."""
        self._thread.start()

    def _serve(self) -> None:
        descriptor = self._listener.fileno()
        ready, _, _ = select.select([descriptor, self._wake], [], [])
        if descriptor in ready:
            argv = [sys.executable, LAUNCH, "--store", str(descriptor), str(os.getpid())]
            self._server = subprocess.Popen(argv, pass_fds=[descriptor], start_new_session=True)


class Forked:
    """A fork of this process; its exit code is as a shell reports it, as torchrun's is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status)
            self.returncode = signals.shell_code(code) if ended else None
        return self.returncode


def start(
    words: Command, env: dict[str, str], forked: Callable[[], None], setup: Callable[[], None]
) -> Forked:
    """Start the rank; `setup` is called in its process, and then `forked` in this one.

    Call it before any thread starts, but for those of `network.alive` and `relay`, which hold no
    lock.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        forked()
        return Forked(pid)
    try:
        os.setsid()
        setup()
        os.closerange(_FIRST, _LAST)
        rank.run(["--", *words.program], env)
    except BaseException:  # noqa: BLE001 - nothing may return into the code of the launcher
        traceback.print_exc()
    os._exit(70)
