"""Which lines of a run's logs to show: of a rank, a node, a task, an attempt; the first error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from deploykit import backend, capabilities
from deploykit.errors import NotFound, UsageError
from deploykit.folding import plain
from deploykit.model import Handle, LogLine
from deploykit.registry import Run

_AGAIN = re.compile(r"restart (\d{1,9})\b")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_ERROR = re.compile(rf"{_TRACEBACK.pattern}|(\w+\.)*\w*(Error|Exception)\b|terminate called|Fatal ")


@dataclass(frozen=True)
class Selection:
    """What a line must be: of a global rank, a node, a task of a job array, an attempt (from 0)."""

    rank: int | None = None
    node: int | None = None
    task: int | None = None
    attempt: int | None = None
    since: datetime | None = None
    """Aware."""
    first_error: bool = False
    """Only the first traceback or error of any rank."""


def of_run(row: Run, wanted: Selection, *, follow: bool) -> Iterator[LogLine]:
    """The selected lines of a run, oldest first; with `follow` until it has ended.

    Raises NotFound where it has no logs, UsageError where it has no such task.
    """
    if row.handle is None:
        raise NotFound(f"{row.run} has no logs: it is {row.state}", hint=row.reason or None)
    if wanted.task is not None:
        _refuse_unknown_task(row.handle, wanted.task)
    return _select(backend.find(row.backend).logs(row.handle, follow=follow), wanted)


def _select(lines: Iterator[LogLine], wanted: Selection) -> Iterator[LogLine]:
    if wanted.task is not None:
        lines = (line for line in lines if line.task == wanted.task)
    if wanted.attempt is not None:
        lines = _attempt(lines, wanted.attempt)
    if wanted.rank is not None:
        lines = (line for line in lines if line.rank == wanted.rank)
    if wanted.node is not None:
        lines = (line for line in lines if line.node == wanted.node)
    if wanted.since is not None:
        lines = _since(lines, wanted.since)
    return _first_error(lines) if wanted.first_error else lines


def _refuse_unknown_task(handle: Handle, task: int) -> None:
    """Raise UsageError where the run has no task of that number."""
    count = capabilities.require(handle.backend, capabilities.Tasks).tasks(handle)
    if count is None:
        raise UsageError(f"{handle.run} is not a job array", hint="omit --task")
    if task not in range(count):
        raise UsageError(f"{handle.run} has no task {task}", hint=f"its tasks are 0 to {count - 1}")


def _since(lines: Iterable[LogLine], moment: datetime) -> Iterator[LogLine]:
    """Lines since `moment`. A line without a time has that of the previous line of its node."""
    reached: set[int | None] = set()
    for line in lines:
        if line.time is not None and line.time >= moment:
            reached.add(line.node)
        if line.node in reached:
            yield line


def _attempt(lines: Iterable[LogLine], number: int) -> Iterator[LogLine]:
    """Lines of one attempt: each node's launcher logs ``restart N`` before all but the first."""
    reached: dict[tuple[int | None, int | None], int] = {}
    for line in lines:
        if line.rank is None and (again := _AGAIN.match(line.text)):
            reached[line.task, line.node] = int(again[1])
        if reached.get((line.task, line.node), 0) == number:
            yield line


def _first_error(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """The first traceback, complete, or the first line that names an error."""
    first = FirstError()
    for line in lines:
        if first.add(line):
            yield line
        if first.complete:
            return


class FirstError:
    """Finds the first traceback of any rank, or the first line that names an error."""

    def __init__(self) -> None:
        self._first: LogLine | None = None
        self.complete = False
        """Whether no further line belongs to it."""

    def add(self, line: LogLine) -> bool:
        """Whether the next line of the log belongs to it."""
        if self.complete:
            return False
        if self._first is None and line.rank is not None and _ERROR.match(plain(line)):
            self._first = line
        first = self._first
        if first is None or (line.task, line.rank) != (first.task, first.rank):
            return False
        ends = line is not first and not plain(line).startswith(" ")
        self.complete = ends or not _TRACEBACK.match(plain(first))
        return True
