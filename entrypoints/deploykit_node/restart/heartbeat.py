"""The heartbeat of a node: a port that accepts connections while the node's launcher lives.

The ranks already use ports that the system chose, so no firewall between the nodes blocks this one.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

from deploykit_node import exit_records, records
from deploykit_node.cluster import Environ
from deploykit_node.network.alive import Listener
from deploykit_node.records import HeartbeatRecord

_PATIENCE = 5.0
"""Seconds for another node to leave its exit record, or to answer."""
_PAUSE = 0.5


def start(env: Environ, node: int, address: str) -> Listener | None:
    """Listen on `address` until what is returned is closed; None without a run folder."""
    folder = records.folder(env)
    if folder is None:
        return None
    listener = Listener(address)
    record: HeartbeatRecord = {
        "host": address,
        "port": listener.port,
        "attempt": exit_records.attempt(env),
    }
    records.write(folder / f"heartbeat-{node}.json", record)
    return listener


def lost_nodes(env: Environ, node: int) -> list[int]:
    """Other nodes whose launcher is gone without an exit record, in order.

    A node that is about to leave one has some seconds to do so.
    """
    from deploykit_node.restart import silent_nodes  # asyncio takes a while to load

    deadline = time.monotonic() + _PATIENCE
    others = {other: record for other, record in _all(env).items() if other != node}
    while True:
        silent = silent_nodes.find(others, _PATIENCE / 2)
        lost = [other for other in silent if not exit_records.has_ended(env, other)]
        if not lost or time.monotonic() > deadline:
            return lost
        others = {other: others[other] for other in lost}
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
