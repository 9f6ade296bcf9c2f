"""An editor's debugger at a rank, as the job asks for (``DEPLOYKIT_DEBUGGER``).

The program waits for it in `debug_server.py`. `deploykit shell --debugger` runs `relay` beside the
rank, so that the editor reaches a port that only the rank's own machine has.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from deploykit_node import records
from deploykit_node.cluster import BadEnvironment, Environ
from deploykit_node.observe import faults

_FILE = "debugger.json"
_PATIENCE = 600.0
"""Seconds from the start of the program's process until it can wait: Python on a slow disk."""
_TICK = 0.1
_PIECE = 1 << 16
_SIZE = b"Content-Length:"


def check(env: Mapping[str, str]) -> None:
    """Raise BadEnvironment where the job asks for a debugger and this Python has none."""
    if env.get("DEPLOYKIT_DEBUGGER") and importlib.util.find_spec("debugpy") is None:
        raise BadEnvironment(
            "--debugger: debugpy is not installed for the Python of the job. Install it with "
            "`pip install debugpy`, or submit without --debugger."
        )


def environment(env: dict[str, str], rank: int) -> dict[str, str]:
    """The variables of a program, with the hook that waits for the debugger at the chosen rank."""
    folder = records.folder(env)
    if folder is None or env.get("DEPLOYKIT_DEBUGGER") != str(rank):
        return env
    (folder / _FILE).unlink(missing_ok=True)
    return faults.hooked(env, "DEPLOYKIT_DEBUG_FILE", folder / _FILE)


def relay(env: Environ) -> None:
    """Connect standard input and output to the debugger of this node's rank, until one ends.

    Each answer gets a line feed at its end, since srun passes on whole lines only. An answer is a
    header with its size, and JSON: https://microsoft.github.io/debug-adapter-protocol/overview
    """
    with _connected(Path(env["DEPLOYKIT_RUN_DIR"], records.FOLDER, _FILE)) as peer:
        threading.Thread(target=_send, args=(peer,), daemon=True).start()
        answers = peer.makefile("rb")
        while size := _size(answers):
            body = answers.read(size) + b"\n"
            _write(b"%s %d\r\n\r\n%s" % (_SIZE, len(body), body))


def _connected(file: Path) -> socket.socket:
    """A connection to the debugger, as soon as the program waits for it."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            port = (records.read(file) or {})["port"]
            return socket.create_connection(("127.0.0.1", port))
        except (KeyError, TypeError, OverflowError, OSError):
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
    while piece := os.read(0, _PIECE):
        peer.sendall(piece)
    peer.shutdown(socket.SHUT_WR)


def _write(piece: bytes) -> None:
    while piece:
        piece = piece[os.write(1, piece) :]
