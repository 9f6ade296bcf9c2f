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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deploykit.backends.slurm.options import Options
from deploykit.job.model import Handle, State, Status
from deploykit.lib import paths

MAX_TASKS = 1_000_000
"""Most task ids that are expanded from one text."""
_LISTED = (
    *(State.RUNNING, State.STOPPING, State.QUEUED, State.BLOCKED, State.UNKNOWN),
    *(State.SUCCEEDED, State.FAILED, State.CANCELLED),
)
"""The order in which the tasks of an array are counted."""
_PRECEDENCE = (
    *(State.UNKNOWN, State.RUNNING, State.STOPPING, State.QUEUED, State.BLOCKED),
    *(State.FAILED, State.CANCELLED, State.SUCCEEDED),
)
"""The state of an array is the first of these that any of its tasks has."""
_TASK = "array_task"
"""In a run folder: the array's folder and the number of the task, a line each."""


def task_ids(job: str) -> Iterator[str]:
    """Expand ``38_[5-7,9%2]`` to ``38_5``, ``38_6`` and so on; yield any other id unchanged.

    An array of more than `MAX_TASKS` tasks is not expanded.
    """
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", job)
    pairs = re.findall(r"(?<![\d-])(\d{1,9})(?:-(\d{1,9}))?(?![\d-])", match[2]) if match else []
    spans = [range(int(first), int(last or first) + 1) for first, last in pairs]
    if match is None or sum(map(len, spans)) > MAX_TASKS:
        yield job
        return
    for span in spans:
        yield from (f"{match[1]}_{number}" for number in span)


def task_handles(array: Handle, numbers: Sequence[int]) -> list[Handle]:
    """A handle for each of these tasks; task N has the folder ``tasks/N`` of the run."""
    folder = Path(array.folder, "tasks")
    return [
        Handle(array.backend, array.target, f"{array.id}_{n}", array.run, str(folder / str(n)))
        for n in numbers
    ]


def combined_status(status_by_task: Mapping[int, Status]) -> Status:
    """The status of an array from those of its tasks, in order; final once all tasks are."""
    statuses = list(status_by_task.values())
    count_by_state = Counter(status.state for status in statuses)
    state = next(state for state in _PRECEDENCE if count_by_state[state])
    counts = [
        f"{count_by_state[state]} {state.value}" for state in _LISTED if count_by_state[state]
    ]
    number, first = next(pair for pair in status_by_task.items() if pair[1].state is state)
    reason = f"{len(statuses)} tasks: {', '.join(counts)}"
    if first.reason and state is not State.SUCCEEDED:
        reason += f"; task {number}: {first.reason}"
    last = max((status.finished for status in statuses if status.finished), default=None)
    seconds = [status.billed for status in statuses if status.billed is not None]
    return Status(
        state,
        first.native,
        reason,
        first.exit_code,
        started=min((status.started for status in statuses if status.started), default=None),
        finished=last if state.final else None,
        billed=sum(seconds) / len(seconds) if len(seconds) == len(statuses) else None,  # per task
    )


# --- records in run folders


def text_of(path: Path | str) -> str | None:
    """The text of a record without its line end; None if it does not exist."""
    try:
        with open(path) as file:  # noqa: PTH123 - as text
            return file.read().strip()
    except FileNotFoundError:
        return None


def record(options: Options) -> str:
    """The record of an array that is one run: how many tasks it has, or after ``=`` which."""
    return f"={numbered(options)}\n" if options.tasks else f"{options.array}\n"


def numbered(options: Options) -> str:
    """The tasks of an array as sbatch takes them: ``0-4``, ``2,5``."""
    if options.tasks:
        return ",".join(map(str, sorted(options.tasks)))
    return f"0-{(options.array or 1) - 1}"


def tasks(handle: Handle) -> Sequence[int] | None:
    """The numbers of the tasks of the run's job array; None where the run is not an array."""
    text = text_of(f"{handle.folder}/array")  # no path object: there may be thousands of handles
    if text is None:
        return None
    return [int(n) for n in text[1:].split(",")] if text.startswith("=") else range(int(text))


def choose_tasks(numbers: Sequence[int]) -> Mapping[str, str]:
    """See `base.Capabilities.choose_tasks`."""
    return {"tasks": f"[{', '.join(map(str, numbers))}]"}


def job_id(folder: Path) -> str | None:
    """The id that sbatch gave the job, ``38_5`` for a task of an array; None if it gave none."""
    job = text_of(folder / "job")
    if not job and (task := task_of(folder)):
        array_job = text_of(task[0] / "job")
        return f"{array_job}_{task[1]}" if array_job else None
    return job


def record_task(run_folder: Path, array: Path, number: int) -> None:
    """Record that a run is task `number` of the array with the folder `array`."""
    paths.write(run_folder / _TASK, f"{array}\n{number}\n")


def task_of(run_folder: Path) -> tuple[Path, int] | None:
    """The folder of a run's array, and the number of its task; None for other runs."""
    text = text_of(run_folder / _TASK)
    if not text:
        return None
    array, _, number = text.partition("\n")
    return Path(array), int(number)


def claimed_by(folder: Path) -> str | None:
    """The id of the job that started the run; None before any of its jobs has started."""
    try:
        claim = os.readlink(folder / "claim")  # noqa: PTH115 - the target is an id, not a path
    except OSError:
        return None
    return claim if re.fullmatch(r"[0-9]{1,18}(_[0-9]{1,9})?", claim) else None
