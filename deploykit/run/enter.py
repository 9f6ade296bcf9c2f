"""Enter a run while it runs: a command beside a rank, the stacks of all ranks, a debugger.

A program that was submitted with `--debugger` waits at its first line. Its port is open on its own
node alone, so each connection of the editor is passed to a command that runs beside the rank.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.diagnose import flight
from deploykit.job import checks
from deploykit.job.model import Handle, State
from deploykit.lib import shell
from deploykit.lib.errors import BackendUnavailable, NotFound, TryAgain, UsageError
from deploykit.observe import stacks
from deploykit.observe.stacks import Dump
from deploykit.run import state as run_state
from deploykit.run.diagnosis import dumps_in
from deploykit.run.registry import Run

DEBUGGER_PORT = 5678
"""The port on this machine: the one in debugpy's examples."""
_LOCALHOST = "127.0.0.1"
_SHOW_FOLDER = ("sh", "-c", "echo; pwd")
"""The folder is the last line: what start-up files on a login node print comes before it."""
_RELAY = ("--debugger",)
"""See `deploykit_node.observe.enter`."""
_HEADER = b"Content-Length: "
"""What each of a debugger's messages begins with, see
https://microsoft.github.io/debug-adapter-protocol/overview#base-protocol."""
_PAUSE = 2.0
"""Seconds between two checks whether the rank runs, or whether the run has ended."""
_RUNNING = {State.RUNNING, State.STOPPING, State.UNKNOWN}


def argv(row: Run, rank: int, command: Sequence[str], *, terminal: bool) -> list[str]:
    """The command line that runs `command` beside a rank; see `base.Capabilities.enter`.

    Raises NotFound if the run is not running, UsageError if its backend cannot do it, TryAgain if
    the rank is not running.
    """
    (row,) = run_state.refresh([row])
    if row.handle is None or State(row.state) not in _RUNNING:
        raise NotFound(
            f"no rank of {row.run} is running (state: {row.state})", hint=row.reason or None
        )
    engine = backend.require(row.backend, "enter")
    return list(engine.enter(row.handle, rank, command, terminal=terminal))


@dataclass(frozen=True)
class RunStacks:
    """The stacks of a run's ranks; as text what `dump` prints."""

    dump: Dump
    kept: bool
    """Whether they were taken earlier: the run has ended."""
    recorder: tuple[str, ...] = ()
    """What PyTorch's flight recorder has written, as sentences."""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(stacks.lines(self.dump))

    def lines(self, *, threads: bool) -> Iterator[str]:
        yield from stacks.lines(self.dump, threads=threads)
        yield from (f"flight recorder: {text}" for text in self.recorder)


def take_stacks(row: Run, *, native: bool = False) -> RunStacks:
    """Take the stacks of a run's ranks and keep them; of a run that has ended, the last kept ones.

    Raises UsageError if its backend cannot, NotFound if the run has not started or has left none,
    BackendUnavailable if no node answers.
    """
    (row,) = run_state.refresh([row])
    state = State(row.state)
    if row.handle is None or not (state.final or state in _RUNNING):
        raise NotFound(
            f"no rank of {row.run} has started (state: {row.state})", hint=row.reason or None
        )
    if state in _RUNNING:
        return _taken(row, row.handle, native=native)
    newest = stacks.newest(Path(row.folder))
    if newest is None:
        raise NotFound(
            f"{row.run} has ended ({row.state}), and no stacks were saved",
            hint=f"`deploykit diagnose {row.run}` explains why it ended",
        )
    sentences, warnings = _recorder(row)
    return RunStacks(stacks.read(newest), True, sentences, warnings)


def _taken(row: Run, handle: Handle, *, native: bool) -> RunStacks:
    engine = backend.find(row.backend)
    if backend.offers(engine, "dump_by_hand"):
        reason, instead = engine.dump_by_hand(handle)
        raise UsageError(reason, hint=instead)
    parent, name = Path(row.folder, stacks.FOLDER), time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    # also for the second dump within a second
    names = (name, *(f"{name}-{number}" for number in range(2, 100)))
    folder = next(path for name in names if not (path := parent / name).exists())
    complaints = backend.require(row.backend, "dump").dump(handle, folder, native=native)
    dump = stacks.read(folder)
    if not dump.ranks:
        raise BackendUnavailable(
            f"no node of {row.run} wrote stacks: {'; '.join(complaints) or 'no rank is running'}",
            hint=f"`deploykit status {row.run}` shows whether it is still running",
        )
    sentences, warnings = _recorder(row)
    return RunStacks(dump, False, sentences, (*complaints, *warnings))


def _recorder(row: Run) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the flight recorder's files of a run say, and what could not be read."""
    recorded, warnings = dumps_in(Path(row.folder))
    return tuple(one.text for one in flight.divergences(recorded)), tuple(warnings)


def debugged_rank(row: Run) -> int:
    """The rank that waits for a debugger. Raises UsageError if none does."""
    variables = row.job_data().get("env")
    text = str(variables.get(checks.DEBUGGER, "")) if isinstance(variables, dict) else ""
    if not text.isdecimal():
        raise UsageError(
            f"no rank of {row.run} is waiting for a debugger",
            hint="submit it with --debugger, or --debugger RANK",
        )
    return int(text)


def working_folder(row: Run, rank: int) -> str:
    """The working folder of a rank on its node, once it runs. Raises NotFound after its end."""
    while True:
        try:
            command = argv(row, rank, _SHOW_FOLDER, terminal=False)
        except (NotFound, TryAgain):
            if _has_ended(row):
                raise
            time.sleep(_PAUSE)
            continue
        done = shell.run(command)
        if done.code:
            raise BackendUnavailable(f"cannot reach rank {rank} of {row.run}: {done.err}")
        return done.out.splitlines()[-1]


def editor_configuration(row: Run, rank: int, remote: str, port: int) -> dict[str, Any]:
    """What an editor needs to connect, in the form of VS Code's `launch.json`.

    https://code.visualstudio.com/docs/python/debugging#_remote-debugging
    """
    local = row.job_data().get("source")
    return {
        "name": f"{row.run}, rank {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": _LOCALHOST, "port": port},
        "pathMappings": [{"localRoot": local or "${workspaceFolder}", "remoteRoot": remote}],
        "justMyCode": True,
    }


def listen_for_editor(port: int) -> socket.socket:
    """A socket of this machine alone, for the editor. Raises UsageError if the port is taken."""
    try:
        return socket.create_server((_LOCALHOST, port))
    except OSError as error:
        raise UsageError(
            f"cannot use port {port} on this machine: {error.strerror}",
            hint="choose another port with --port",
        ) from error


def serve_debugger(row: Run, rank: int, server: socket.socket) -> Iterator[None]:
    """Pass connections to the rank until the run has ended; yields for each connection."""
    server.settimeout(_PAUSE)
    while not _has_ended(row):
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        with closing(connection):
            connection.setblocking(True)
            shell.serve(argv(row, rank, _RELAY, terminal=False), connection, _HEADER)
        yield


def _has_ended(row: Run) -> bool:
    return State(run_state.refresh([row])[0].state).final
