"""The command line that enters a run: a command beside one of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from deploykit.backends import base as backend
from deploykit.job.model import State
from deploykit.lib.errors import NotFound
from deploykit.run import state as run_state
from deploykit.run.registry import Run

_RUNNING = {State.RUNNING, State.STOPPING, State.UNKNOWN}


def argv(row: Run, rank: int, command: Sequence[str], *, terminal: bool) -> list[str]:
    """The command line; see `base.Capabilities.enter`.

    Raises NotFound where the run is not running, UsageError where its backend cannot, TryAgain
    where the rank is not running.
    """
    (row,) = run_state.refresh([row])
    if row.handle is None or State(row.state) not in _RUNNING:
        raise NotFound(
            f"no rank of {row.run} is running (state: {row.state})", hint=row.reason or None
        )
    engine = backend.require(row.backend, "enter")
    return list(engine.enter(row.handle, rank, command, terminal=terminal))
