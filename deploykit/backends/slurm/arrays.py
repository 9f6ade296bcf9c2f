"""Job arrays: the ids, folders and records of the tasks, and one status for all of them.

Several runs may be submitted as the tasks of one array, which then has a folder of its own:

==================  ==============================================================
``source``          the bundle's files, which each task copies
``.deploykit``      the node plane, which all tasks share
``tasks/K``         a link to the run folder of task K
``name``            the name of the job, with which the ids of its runs begin
``cluster``, ``job``  as in a run folder
==================  ==============================================================
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploykit.job.model import Handle, State, Status
from deploykit.lib import paths

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


def tasks(handle: Handle) -> int | None:
    """The length of the run's job array; None where the run is not an array."""
    text = text_of(f"{handle.folder}/array")  # no path object: there may be thousands of handles
    return None if text is None else int(text)


def job_id(folder: Path) -> str | None:
    """The id that sbatch gave the job; None where no job was submitted from this machine."""
    return text_of(folder / "job") or _task_id(folder)


def text_of(path: Path | str) -> str | None:
    """The text of a record without its line end; None where there is none."""
    try:
        with open(path) as file:  # noqa: PTH123 - as text
            return file.read().strip()
    except FileNotFoundError:
        return None


_TASK = "array_task"
"""In a run folder: the array's folder and the number of the task, a line each."""


def record_task(run_folder: Path, array: Path, number: int) -> None:
    """Record that a run is task `number` of an array."""
    paths.write(run_folder / _TASK, f"{array}\n{number}\n")


def task_of(run_folder: Path) -> tuple[Path, int] | None:
    """The folder of a run's array, and the number of its task; None for other runs."""
    array, _, number = (text_of(run_folder / _TASK) or "").partition("\n")
    return (Path(array), int(number)) if number.isdecimal() else None


def _task_id(run_folder: Path) -> str | None:
    """The id of a run's task, such as ``38_5``; None where no array of it was queued."""
    known, job = task_of(run_folder), _of_array(run_folder, "job")
    return f"{job}_{known[1]}" if known and job else None


def name_of(run_folder: Path) -> str | None:
    """The name of the job of which a run is a task; None for other runs."""
    return _of_array(run_folder, "name")


def cluster_of(run_folder: Path) -> str | None:
    """The cluster to which a run's array was submitted; None for other runs."""
    return _of_array(run_folder, "cluster")


def _of_array(run_folder: Path, file: str) -> str | None:
    """What a file of the run's array says; None where there is none, and for other runs."""
    known = task_of(run_folder)
    return (text_of(known[0] / file) or None) if known else None


def claimed_by(folder: Path) -> str | None:
    """The id of the job that started the run; None before any of its jobs has started."""
    try:
        claim = os.readlink(folder / "claim")  # noqa: PTH115 - the target is an id, not a path
    except OSError:
        return None
    return claim if re.fullmatch(r"[0-9]{1,18}(_[0-9]{1,9})?", claim) else None
