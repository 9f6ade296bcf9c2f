"""An editor's debugger at a rank of a run: wait until it can connect, and pass its connections on.

The program waits at its first line (`submit --debugger`). Its port is open on its own node alone,
so each connection of the editor is given to a command that runs beside the rank.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from deploykit.job import checks
from deploykit.job.model import State
from deploykit.lib import shell
from deploykit.lib.errors import BackendUnavailable, NotFound, TryAgain, UsageError
from deploykit.run import facts as run_facts
from deploykit.run import shell as run_shell
from deploykit.run import state as run_state
from deploykit.run.registry import Run

PORT = 5678
"""The port on this machine: the one that debugpy's examples have."""
_HERE = "127.0.0.1"
_WHERE = ("sh", "-c", "echo; pwd")
"""The folder is the last line: what start-up files on a login node print comes before it."""
_RELAY = ("--debugger",)
"""See `deploykit_node.inspect.enter`."""
_HEADER = b"Content-Length: "
"""What each of a debugger's messages begins with, see
https://microsoft.github.io/debug-adapter-protocol/overview#base-protocol."""
_PAUSE = 2.0
"""Seconds between two looks whether the rank runs, or whether the run has ended."""


def rank_of(row: Run) -> int:
    """The rank that waits. Raises UsageError where none does."""
    variables = run_facts.job_data(Path(row.folder)).get("env")
    text = str(variables.get(checks.DEBUGGER, "")) if isinstance(variables, dict) else ""
    if not text.isdecimal():
        raise UsageError(
            f"no rank of {row.run} waits for a debugger",
            hint="submit it with --debugger, or --debugger RANK",
        )
    return int(text)


def folder(row: Run, rank: int) -> str:
    """The working folder of a rank on its node, once it runs. Raises NotFound after its end."""
    while True:
        try:
            argv = run_shell.argv(row, rank, _WHERE, terminal=False)
        except (NotFound, TryAgain):
            if _has_ended(row):
                raise
            time.sleep(_PAUSE)
            continue
        done = shell.run(argv)
        if done.code:
            raise BackendUnavailable(f"rank {rank} of {row.run} cannot be reached: {done.err}")
        return done.out.splitlines()[-1]


def configuration(row: Run, rank: int, remote: str, port: int) -> dict[str, Any]:
    """What an editor needs to connect, in the form of VS Code's `launch.json`.

    https://code.visualstudio.com/docs/python/debugging#_remote-debugging
    """
    local = run_facts.job_data(Path(row.folder)).get("source")
    return {
        "name": f"{row.run}, rank {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": _HERE, "port": port},
        "pathMappings": [{"localRoot": local or "${workspaceFolder}", "remoteRoot": remote}],
        "justMyCode": True,
    }


def listening(port: int) -> socket.socket:
    """A socket of this machine alone, for the editor. Raises UsageError where the port is taken."""
    try:
        return socket.create_server((_HERE, port))
    except OSError as error:
        raise UsageError(
            f"port {port} of this machine cannot be used: {error.strerror}",
            hint="choose another with --port",
        ) from error


def serve(row: Run, rank: int, server: socket.socket) -> Iterator[None]:
    """Pass connections on until the run has ended; yields for each that an editor makes."""
    server.settimeout(_PAUSE)
    while not _has_ended(row):
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        with closing(connection):
            connection.setblocking(True)
            shell.serve(run_shell.argv(row, rank, _RELAY, terminal=False), connection, _HEADER)
        yield


def _has_ended(row: Run) -> bool:
    return State(run_state.refresh([row])[0].state).final
