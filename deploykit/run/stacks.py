"""Where the ranks of a run stand now, or stood when a dump was last kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.diagnose import flight
from deploykit.job.model import Handle, State
from deploykit.lib.errors import BackendUnavailable, NotFound, UsageError
from deploykit.observe.inspect import report, stacks
from deploykit.observe.inspect.stacks import Dump
from deploykit.run import state as run_state
from deploykit.run.diagnosis import dumps_in
from deploykit.run.registry import Run

_RUNNING = {State.RUNNING, State.STOPPING, State.UNKNOWN}


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
        return "\n".join(report.lines(self.dump))


def take(row: Run, *, native: bool = False) -> RunStacks:
    """Take the stacks of a run's ranks and keep them; of a run that has ended, the last kept ones.

    Raises UsageError where its backend cannot, NotFound where the run has not started or has left
    none, BackendUnavailable where no node answers.
    """
    (row,) = run_state.refresh([row])
    state = State(row.state)
    if row.handle is None or state not in _RUNNING | {one for one in State if one.final}:
        raise NotFound(
            f"no rank of {row.run} has started: it is {row.state}", hint=row.reason or None
        )
    if state in _RUNNING:
        return _taken(row, row.handle, native=native)
    newest = stacks.newest(Path(row.folder))
    if newest is None:
        raise NotFound(
            f"{row.run} has ended ({row.state}), and no stacks were saved",
            hint=f"`deploykit diagnose {row.run}` finds why it ended",
        )
    return RunStacks(stacks.read(newest), True, *_recorder(row))


def _taken(row: Run, handle: Handle, *, native: bool) -> RunStacks:
    engine = backend.find(row.backend)
    if backend.offers(engine, "dump_by_hand"):
        reason, instead = engine.dump_by_hand(handle)
        raise UsageError(reason, hint=instead)
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = _fresh(Path(row.folder, stacks.FOLDER), name)
    complaints = backend.require(row.backend, "dump").dump(handle, folder, native=native)
    dump = stacks.read(folder)
    if not dump.ranks:
        raise BackendUnavailable(
            f"no node of {row.run} has written stacks: {'; '.join(complaints) or 'no rank runs'}",
            hint=f"`deploykit status {row.run}` shows whether it is still running",
        )
    sentences, warnings = _recorder(row)
    return RunStacks(dump, False, sentences, (*complaints, *warnings))


def _fresh(parent: Path, name: str) -> Path:
    """A folder that does not exist yet, also for the second dump within a second."""
    names = (name, *(f"{name}-{number}" for number in range(2, 100)))
    return next((path for one in names if not (path := parent / one).exists()), parent / name)


def _recorder(row: Run) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the flight recorder's files of a run say, and what could not be read."""
    recorded, warnings = dumps_in(Path(row.folder))
    if not recorded:
        return (), tuple(warnings)
    try:
        sentences = [divergence.text for divergence in flight.divergences(recorded)]
    except BackendUnavailable as error:
        return (), (*warnings, error.message)
    return tuple(sentences), tuple(warnings)


def lines(taken: RunStacks, *, threads: bool) -> Iterator[str]:
    """What `dump` prints."""
    yield from report.lines(taken.dump, threads=threads)
    yield from (f"flight recorder: {text}" for text in taken.recorder)
