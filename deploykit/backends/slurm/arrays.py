"""Job arrays: the ids and folders of the tasks, and one status for all of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploykit.job.model import Handle, State, Status

_LABELS = {
    State.RUNNING: "running",
    State.STOPPING: "stopping",
    State.QUEUED: "queued",
    State.BLOCKED: "blocked",
    State.UNKNOWN: "unknown",
    State.SUCCEEDED: "succeeded",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
}
MAX_TASKS = 1_000_000
"""Most task ids that are expanded from one text."""
_PRECEDENCE = (
    *(State.UNKNOWN, State.RUNNING, State.STOPPING, State.QUEUED, State.BLOCKED),
    *(State.FAILED, State.CANCELLED, State.SUCCEEDED),
)
"""The state of an array is the first of these that any of its tasks has."""


def task_ids(job: str) -> Iterator[str]:
    """Expand ``38_[5-7,9%2]`` to ``38_5``, ``38_6`` and so on; yield any other id unchanged.

    An array of more than `MAX_TASKS` tasks is not expanded.
    """
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", job)
    spans = [_span(part) for part in match[2].split(",")] if match else []
    if match is None or sum(map(len, spans)) > MAX_TASKS:
        yield job
        return
    for span in spans:
        yield from (f"{match[1]}_{number}" for number in span)


def _span(text: str) -> range:
    """``5-7`` as 5, 6 and 7; empty for text of another form."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    return range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)


def task_handles(array: Handle, count: int) -> list[Handle]:
    """A handle for each of the `count` tasks; task N has the folder ``tasks/N`` of the run."""
    folder = Path(array.folder, "tasks")
    return [
        Handle(array.backend, array.target, f"{array.id}_{n}", array.run, str(folder / str(n)))
        for n in range(count)
    ]


def combined_status(statuses: Sequence[Status]) -> Status:
    """The status of an array from those of its tasks, in order; final once all tasks are."""
    count_by_state = Counter(status.state for status in statuses)
    state = next(state for state in _PRECEDENCE if count_by_state[state])
    counts = [
        f"{count_by_state[state]} {label}"
        for state, label in _LABELS.items()
        if count_by_state[state]
    ]
    number, first = next((n, status) for n, status in enumerate(statuses) if status.state is state)
    reason = f"{len(statuses)} tasks: {', '.join(counts)}"
    if first.reason and state is not State.SUCCEEDED:
        reason += f"; task {number}: {first.reason}"
    started = min((status.started for status in statuses if status.started), default=None)
    last = max((status.finished for status in statuses if status.finished), default=None)
    finished = last if state.final else None
    seconds = [status.billed for status in statuses]
    known = [one for one in seconds if one is not None]
    billed = sum(known) / len(known) if len(known) == len(seconds) else None  # of each task
    end = (first.exit_code, started, finished)
    return Status(state, first.native, reason, *end, billed=billed)
