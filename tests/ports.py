"""Ports for servers that the tests start."""

from __future__ import annotations

import contextlib
import os
import random
import socket


def free_port():
    """One of this worker's own, above those of the Slurm clusters and below the kernel's.

    No other process takes it before the server starts, seconds later.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 32_000 + 190 * (worker % 4) + random.SystemRandom().randrange(190)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
