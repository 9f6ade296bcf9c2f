"""The heartbeat of a node: a port that accepts connections while the node's launcher lives.

No code has to answer: the kernel completes connections to a listening socket. The ranks already
use ports that the system chose, so no firewall between the nodes blocks this one.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import cast

from deploykit_node import exit_records, records
from deploykit_node.cluster import Environ
from deploykit_node.records import HeartbeatRecord

_PATIENCE = 5.0
"""Seconds for another node to leave its exit record, or to answer."""
_PAUSE = 0.2


def start(env: Environ, node: int, address: str) -> socket.socket | None:
    """Listen on `address` until the returned socket is closed; None without a run folder."""
    folder = records.folder(env)
    if folder is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen()
    record: HeartbeatRecord = {
        "host": address,
        "port": listener.getsockname()[1],
        "attempt": exit_records.attempt(env),
    }
    records.write(folder / f"heartbeat-{node}.json", record)
    return listener


def lost_nodes(env: Environ, node: int) -> list[int]:
    """Other nodes whose launcher is gone without an exit record, in order.

    A node that is about to leave one has some seconds to do so.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        ended = exit_records.nodes(env)
        listening = _all(env)
        open_ended = [other for other in listening if other not in ended and other != node]
        lost = sorted(other for other in open_ended if not _answers(listening[other]))
        if not lost or time.monotonic() > deadline:
            return lost
        time.sleep(_PAUSE)


def _all(env: Environ) -> dict[int, HeartbeatRecord]:
    """The heartbeats of this attempt, by node."""
    folder, current = Path(env["DEPLOYKIT_RUN_DIR"], records.FOLDER), exit_records.attempt(env)
    fields = {"host": str, "port": int, "attempt": int}
    heartbeats = records.read_all(folder, "heartbeat-*.json", fields)
    return {
        node: cast(HeartbeatRecord, record)
        for node, record in heartbeats
        if record["attempt"] == current
    }


def _answers(record: HeartbeatRecord) -> bool:
    try:
        with socket.create_connection((record["host"], record["port"]), _PATIENCE):
            return True
    except OSError:
        return False
