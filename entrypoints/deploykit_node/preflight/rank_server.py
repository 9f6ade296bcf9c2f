"""Fork a rank of the test's group for each request, so that a node imports PyTorch once.

Requests are messages on a Unix socket: JSON for the rank, and with it the socket that becomes the
rank's stdin and output. The fork has only this thread, and no GPU is used before it. Ends when its
stdin is closed; the ranks end with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from deploykit_node import signals

END = b"end"
"""The message that kills the ranks of earlier requests."""
LONGEST = 1 << 14
"""Bytes of a request."""
READY = "ready"
"""The line that says that requests are taken."""


def serve(control: int, rank: Callable[[dict[str, Any]], None]) -> None:
    """Call `rank` with each request that comes on the socket `control`, in a process of its own.

    The variables in its ``env`` are set there. One with ``stays`` outlives `END`.
    """
    running: list[int] = []
    setup = signals.child_setup(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.SIGKILL)
    print(READY, flush=True)
    with socket.socket(fileno=control) as requests:
        while sys.stdin.fileno() not in select.select([requests, sys.stdin], [], [])[0]:
            text, sockets, _, _ = socket.recv_fds(requests, LONGEST, 1)
            if text == END:
                running = _killed(running)
                continue
            request = json.loads(text)
            pid = os.fork()
            if not pid:
                setup()
                _become(sockets[0], request, rank)
            os.close(sockets[0])
            if not request.get("stays"):
                running.append(pid)


def _killed(pids: list[int]) -> list[int]:
    """Kill ranks; returns those that have not ended yet, as one that waits for a driver."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # none has been waited for, so no number is used anew
    return [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]


def _become(own: int, request: dict[str, Any], rank: Callable[[dict[str, Any]], None]) -> None:
    """Be the rank that was requested, with `own` as its stdin and output. Does not return."""
    code = 1
    try:
        for descriptor in range(3):
            os.dup2(own, descriptor)
        os.environ.update(request["env"])
        rank(request)
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not return
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
