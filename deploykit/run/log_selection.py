"""Select lines of a run's logs: by rank, node, task, attempt or time; the first error."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from deploykit.backends import base as backend
from deploykit.job.model import LogLine
from deploykit.lib.errors import NotFound, UsageError
from deploykit.observe.folding import Folding, may_fold, plain
from deploykit.observe.logfiles import Lines
from deploykit.run.registry import Run

SLOW_RANK = re.compile(r"step \d{1,15}: rank \d{1,9} is slow: ")
"""What the reference trainer logs (entrypoints/trainer/measure/meter.py)."""
_AGAIN = re.compile(r"restart (\d{1,9})\b")
_TRACEBACK = re.compile(r"( *\+ Exception Group )?Traceback \(most recent call last\)")
_ERROR = re.compile(
    rf"{_TRACEBACK.pattern}|(\w+\.)*\w*(Error|Exception)\b|terminate called|Fatal |FATAL\b"
)


@dataclass(frozen=True)
class Selection:
    """The global rank, node, task of a job array and attempt (from 0) of a line."""

    rank: int | None = None
    node: int | None = None
    task: int | None = None
    attempt: int | None = None
    since: datetime | None = None
    """Aware."""
    first_error: bool = False
    """Only the first traceback or error of any rank."""

    @property
    def of_each_line(self) -> bool:
        return self.attempt is None and self.since is None and not self.first_error


def of_run(row: Run, wanted: Selection, *, follow: bool) -> Iterator[LogLine]:
    """The selected lines of a run, oldest first; with `follow` until it has ended.

    Raises NotFound if it has no logs, UsageError if it has no such task.
    """
    return _select(_lines(row, wanted, follow=follow), wanted)


def texts(
    row: Run, wanted: Selection, folding: Folding | None, *, follow: bool
) -> Iterator[LogLine | str]:
    """The same, folded, as lines and as texts of many lines, as a pipe shows them. Raises as above.

    Many lines at once are several times faster; a text has only lines that nothing folds.
    """
    lines = _lines(row, wanted, follow=follow)
    if not isinstance(lines, Lines) or not wanted.of_each_line:
        chosen = _select(lines, wanted)
        yield from folding.fold(chosen) if folding else chosen
        return
    for batch in lines.batches():
        text = batch.plain() if folding is None or folding.is_idle else None
        if text is not None and (folding is None or not may_fold(text)):
            yield text
        else:
            chosen = _select(batch.lines(), wanted)
            yield from folding.feed(chosen) if folding else chosen
    yield from folding.rest() if folding else ()


def tail(
    row: Run,
    wanted: Selection,
    count: int,
    folded: Callable[[Iterable[LogLine]], Iterator[LogLine]],
    *,
    follow: bool,
) -> Iterator[LogLine]:
    """The last `count` selected lines, folded, and with `follow` those that come. Raises as above.

    Log files on this machine are read from their ends, so a traceback may be shown whole that is
    equal to a much earlier one. `folded` may be called several times, each time for all lines.
    """

    def chosen(lines: Iterable[LogLine]) -> Iterator[LogLine]:
        return folded(_select(iter(lines), wanted))

    lines = _lines(row, wanted, follow=follow)
    if isinstance(lines, Lines) and wanted.of_each_line:
        yield from lines.tail(count, chosen)
        yield from chosen(lines) if follow else ()
    elif follow:
        seen = sum(1 for _ in chosen(_lines(row, wanted, follow=False)))
        yield from islice(chosen(lines), max(0, seen - count), None)
    else:
        yield from deque(chosen(lines), count)


def _lines(row: Run, wanted: Selection, *, follow: bool) -> Iterator[LogLine]:
    """The lines of a run; of log files on this machine only those of the rank, node or task."""
    if row.handle is None:
        raise NotFound(f"{row.run} has no logs (state: {row.state})", hint=row.reason or None)
    if wanted.task is not None:
        numbers = backend.require(row.backend, "tasks").tasks(row.handle)
        if numbers is None:
            raise UsageError(f"{row.run} is not a job array", hint="omit --task")
        if wanted.task not in numbers:
            listed = ", ".join(map(str, numbers))
            if isinstance(numbers, range):
                listed = f"{numbers[0]} to {numbers[-1]}"
            hint = f"existing tasks: {listed}"
            raise UsageError(f"{row.run} has no task {wanted.task}", hint=hint)
    lines = backend.find(row.backend).logs(row.handle, follow=follow)
    if isinstance(lines, Lines):
        lines.logs.node, lines.logs.task = wanted.node, wanted.task
        if wanted.attempt is None:  # else the lines of the launchers are needed
            lines.logs.rank = wanted.rank
    return lines


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
    return FirstError().of(lines) if wanted.first_error else lines


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


class FirstError:
    """Finds the first traceback of any rank, or the first line that names an error."""

    def __init__(self) -> None:
        self._first: LogLine | None = None
        self.complete = False
        """Whether no further line belongs to it."""

    def of(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Its lines, a traceback complete."""
        for line in lines:
            if self.add(line):
                yield line
            if self.complete:
                return

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
