"""Whether other nodes are alive: a port that accepts connections while a node's launcher lives.

The ranks already use ports that the system chose, so no firewall between the nodes blocks this one.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import cast

from deploykit_node import records, signals
from deploykit_node.cluster import Environ
from deploykit_node.records import HeartbeatRecord

_PATIENCE = 5.0
"""Seconds for another node to leave its exit record, or to answer."""
_PAUSE = 0.5
_AT_ONCE = 256
"""Connections at a time; a process may have 1,024 files open."""


class Listener:
    """Such a port, on one address. It closes each connection at once: none fills a queue."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._socket.bind((address, 0))
        self._socket.listen(socket.SOMAXCONN)
        self.port: int = self._socket.getsockname()[1]
        self._closed = False
        signals.start_thread(self._accept)

    def _accept(self) -> None:
        while not self._closed:
            try:
                self._socket.accept()[0].close()
            except OSError:  # such as too many open files
                time.sleep(0.1)
        self._socket.close()

    def close(self) -> None:
        """Live no more, for the other nodes."""
        self._closed = True
        with contextlib.suppress(OSError):  # of macOS
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends `accept`


def answers(host: str, port: int, seconds: float) -> bool:
    """Whether the launcher that listens there lives."""
    try:
        with socket.create_connection((host, port), seconds):
            return True
    except OSError:
        return False


def start(env: Environ, node: int, address: str) -> Listener | None:
    """Listen on `address` until what is returned is closed; None without a run folder."""
    folder = records.folder(env)
    if folder is None:
        return None
    listener = Listener(address)
    record: HeartbeatRecord = {
        "host": address,
        "port": listener.port,
        "attempt": records.attempt(env),
    }
    records.write(folder / f"heartbeat-{node}.json", record)
    return listener


def lost_nodes(env: Environ, node: int) -> list[int]:
    """Other nodes whose launcher is gone without an exit record, in order.

    A node that is about to leave one has some seconds to do so.
    """
    deadline = time.monotonic() + _PATIENCE
    others = {other: record for other, record in _heartbeats(env).items() if other != node}
    while True:
        lost = [other for other in _silent(others) if not records.has_ended(env, other)]
        if not lost or time.monotonic() > deadline:
            return lost
        others = {other: others[other] for other in lost}
        time.sleep(_PAUSE)


def _silent(heartbeats: dict[int, HeartbeatRecord]) -> list[int]:
    """The nodes, in order, that accept no connection."""
    from concurrent.futures import ThreadPoolExecutor  # not loaded in every launcher

    def lives(record: HeartbeatRecord) -> bool:
        return answers(record["host"], record["port"], _PATIENCE / 2)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        living = pool.map(lives, heartbeats.values())
        return sorted(node for node, lives in zip(heartbeats, living, strict=True) if not lives)


def _heartbeats(env: Environ) -> dict[int, HeartbeatRecord]:
    """The heartbeats of this attempt, by node."""
    folder, current = Path(env["DEPLOYKIT_RUN_DIR"], records.FOLDER), records.attempt(env)
    fields = {"host": str, "port": int, "attempt": int}
    heartbeats = records.read_all(folder, "heartbeat-*.json", fields)
    return {
        node: cast(HeartbeatRecord, record)
        for node, record in heartbeats
        if record["attempt"] == current
    }
