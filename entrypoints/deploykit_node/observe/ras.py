"""What NCCL itself tells of the communicators of a job: its RAS service, since NCCL 2.24.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

from __future__ import annotations

import contextlib
import socket
import time

from deploykit_node.cluster import Environ

_ADDRESS = "localhost:28028"
_PROTOCOL = 2
_HANDSHAKE = 1.0
"""Seconds: the processes of a node share the port, and one that hangs does not answer."""
_TRIES = 3
_COLLECTING = 5
"""Seconds that NCCL waits for its processes on other nodes."""
_PATIENCE = 20.0
_LONGEST = 1 << 20


def query(env: Environ) -> str:
    """Return NCCL's report on all communicators; empty without an answer."""
    if env.get("NCCL_RAS_ENABLE") == "0":
        return ""
    host, _, port = env.get("NCCL_RAS_ADDR", _ADDRESS).rpartition(":")
    for _ in range(_TRIES):
        try:
            return _ask(host.strip("[]"), int(port))
        except TimeoutError:
            continue
        except (OSError, ValueError):  # there is no NCCL, an older one, or another service
            break
    return ""


def _ask(host: str, port: int) -> str:
    end = time.monotonic() + _PATIENCE
    with socket.create_connection((host, port), _HANDSHAKE) as connection:
        with connection.makefile("rwb") as stream:
            for command, answer in (
                (f"CLIENT PROTOCOL {_PROTOCOL}", b"SERVER PROTOCOL "),
                (f"TIMEOUT {_COLLECTING}", b"OK"),
            ):
                stream.write(f"{command}\n".encode())
                stream.flush()
                if not stream.readline(_LONGEST).startswith(answer):
                    return ""
        connection.sendall(b"VERBOSE STATUS\n")
        report = b""
        with contextlib.suppress(TimeoutError):
            while len(report) < _LONGEST:
                connection.settimeout(max(0.1, end - time.monotonic()))
                part = connection.recv(1 << 16)
                if not part:
                    break
                report += part
        return report.decode(errors="replace")
