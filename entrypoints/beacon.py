"""A sign of life for the other nodes of the job: a port that answers while this launcher lives.

Nobody needs to answer: the kernel completes connections for a socket that listens. The ranks
already talk to each other on ports that the system chose, so nothing between the nodes is in
the way of this one.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import ends

Environ = ends.Environ

_PATIENCE = 5.0
"""Seconds for another node to leave its end, or to answer."""
_PAUSE = 0.2


def light(env: Environ, node: int, address: str) -> socket.socket | None:
    """Answer from now on, as long as the returned socket is open."""
    folder = ends.run_folder(env)
    if folder is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    beacon = socket.socket(family)
    beacon.bind((address, 0))
    beacon.listen()
    record = {"host": address, "port": beacon.getsockname()[1], "attempt": ends.attempt(env)}
    ends.write(folder / f"beacon-{node}.json", record)
    return beacon


def dark(env: Environ, node: int) -> list[int]:
    """Other nodes that do not answer any more and have left no end.

    A node that is about to leave one has some seconds to do so.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        ended = ends.nodes(env)
        silent = [other for other in _lit(env) if other not in ended and other != node]
        gone = sorted(other for other in silent if not _answers(_lit(env)[other]))
        if not gone or time.monotonic() > deadline:
            return gone
        time.sleep(_PAUSE)


def _lit(env: Environ) -> dict[int, ends.Record]:
    """The beacons of this attempt."""
    folder, this = Path(env["DEPLOYKIT_RUN_DIR"], "ends"), ends.attempt(env)
    found = {int(path.stem[7:]): ends.read(path) for path in folder.glob("beacon-*.json")}
    return {node: record for node, record in found.items() if record and record["attempt"] == this}


def _answers(beacon: ends.Record) -> bool:
    try:
        with socket.create_connection((beacon["host"], beacon["port"]), _PATIENCE):
            return True
    except OSError:
        return False
