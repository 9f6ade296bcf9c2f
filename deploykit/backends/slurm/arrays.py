"""A job array: one run of many tasks, each with a folder of its own, and their common status."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploykit.model import Handle, State, Status

_WORDS = {
    State.RUNNING: "run",
    State.STOPPING: "stop",
    State.QUEUED: "wait",
    State.UNKNOWN: "unknown",
    State.SUCCEEDED: "succeeded",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
}
MOST = 1_000_000
"""Tasks that are written out, at most."""
_LIVELIEST = (State.UNKNOWN, State.RUNNING, State.STOPPING, State.QUEUED)
_WORST = (State.FAILED, State.CANCELLED, State.SUCCEEDED)


def tasks(job: str) -> Iterator[str]:
    """``38_[5-7,9%2]`` as ``38_5``, ``38_6`` and so on; any other id as it is."""
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", job)
    spans = [_span(part) for part in match[2].split(",")] if match else []
    if match is None or sum(map(len, spans)) > MOST:
        yield job
        return
    for span in spans:
        yield from (f"{match[1]}_{number}" for number in span)


def _span(text: str) -> range:
    """``5-7`` as 5, 6 and 7; nothing for what is no such text."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    return range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)


def handles(array: Handle, count: int) -> list[Handle]:
    """A handle for each task."""
    folder = Path(array.folder, "tasks")
    return [
        Handle(array.backend, array.target, f"{array.id}_{n}", array.run, str(folder / str(n)))
        for n in range(count)
    ]


def status(found: Sequence[Status]) -> Status:
    """The status of an array from those of its tasks: it has ended when all have."""
    counted = Counter(one.state for one in found)
    state = next(one for one in (*_LIVELIEST, *_WORST) if counted[one])
    told = [f"{counted[one]} {word}" for one, word in _WORDS.items() if counted[one]]
    number, first = next((n, one) for n, one in enumerate(found) if one.state is state)
    reason = f"of {len(found)} tasks {', '.join(told)}"
    if first.reason and state is not State.SUCCEEDED:
        reason += f"; task {number}: {first.reason}"
    started = min((one.started for one in found if one.started), default=None)
    ended = max((one.finished for one in found if one.finished), default=None)
    finished = ended if state.final else None
    return Status(state, first.native, reason, first.exit_code, started, finished)
