"""Processes that wait for others in `init_process_group`, and the address where they wait."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deploykit_node import records
from deploykit_node.observe import spy
from deploykit_node.observe.stacks import NoStacks

_CALL, _FILE = "_create_c10d_store", "/torch/distributed/rendezvous.py"
_HELPERS = "/multiprocessing/resource_tracker.py"
_PATIENCE = 3.0


class Meeting(NamedTuple):
    """How many processes wait; `address` is ``HOST:PORT`` where that could be read."""

    number: int
    address: str = ""
    refused: bool = False
    """Whether nobody listens there."""

    def __str__(self) -> str:
        who = f"{self.number} of {self.number} processes wait"
        if not self.address:
            return f"{who} in init_process_group"
        if self.refused:
            return f"{who} to connect to {self.address}, where nobody listens"
        return f"{who} for others at {self.address}"


def find(folder: Path) -> Meeting | None:
    """What the processes in a dump of this node wait for; None if any of them is elsewhere."""
    nodes = [records.read(path) or {} for path in folder.glob("*.json")]
    ranks: list[dict[str, Any]] = [rank for node in nodes for rank in node.get("ranks", ())]
    processes = [one for rank in ranks for one in _processes(rank)]
    if not processes or not all(map(_waits, processes)):
        return None
    addresses = list(filter(None, (_address(one["pid"]) for one in processes[:1])))
    if not addresses:
        return Meeting(len(processes))
    host, port = addresses[0]
    return Meeting(len(processes), f"{host}:{port}", _is_refused(host, port))


def _processes(rank: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The process of a rank, or those that it has started and waits for."""
    started = [one for one in rank["children"] if _frames(one) and not _helps(one)]
    yield from started if any(map(_waits, started)) else [rank["process"]]


def _frames(process: dict[str, Any]) -> list[dict[str, Any]]:
    threads = process["threads"]
    return threads[0]["frames"] if threads else []


def _helps(process: dict[str, Any]) -> bool:
    return any(_HELPERS in frame["file"] for frame in _frames(process))


def _waits(process: dict[str, Any]) -> bool:
    return any(
        frame["name"] == _CALL and frame["file"].endswith(_FILE) for frame in _frames(process)
    )


def _address(pid: int) -> tuple[str, int] | None:
    """The host and port that a process was given, if py-spy can read them."""
    program = spy.program("")
    if program is None:
        return None
    try:
        values = spy.local_variables(program, pid, _CALL)
        host, port = json.loads(values["hostname"]), int(values["port"])
    except (NoStacks, LookupError, TypeError, ValueError):
        return None
    return (host, port) if isinstance(host, str) and 0 < port < 1 << 16 else None


def _is_refused(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _PATIENCE).close()
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False
