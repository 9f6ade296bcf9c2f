"""Data behind `watch`: state, progress, first error, restarts.

Each refresh queries every backend once: for the states of all its runs, or for the log of one of
them, if that is on another machine. The same log is read again only after `LOGS_AGAIN` seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploykit.job.model import LogLine, State
from deploykit.observe import exit_records, usage
from deploykit.observe.folding import plain
from deploykit.observe.metrics.progress import Progress
from deploykit.observe.usage import RankUsage
from deploykit.run import diagnosis as run_diagnosis
from deploykit.run import state as run_state
from deploykit.run.log_selection import SLOW_RANK, FirstError
from deploykit.run.metrics import RunMetrics, logs_are_here
from deploykit.run.registry import Run

LOGS_AGAIN = 30.0
"""Seconds between two requests for a log that is on another machine."""
_MAX_FIRST_READ = 1 << 22
_MAX_ERROR_LINES = 200


@dataclass(frozen=True)
class View:
    row: Run
    progress: Progress
    attempt: int
    """The current one, from 0."""
    restarts: tuple[str, ...]
    """The known reasons of the restarts, in their order."""
    error: tuple[LogLine, ...]
    """The first error of any rank; the end of a long one."""
    cause: str
    problems: tuple[str, ...]
    usage: tuple[RankUsage, ...] = ()
    slowest: str = ""


class Watch:
    def __init__(self, rows: Iterable[Run]) -> None:
        self._watched = [_Watched(row) for row in rows]
        self._fetched: dict[str, _Watched] = {}
        """The run whose log each backend returned in the last refresh."""

    @property
    def final(self) -> bool:
        """Whether all runs have ended, and their logs were read to the end."""
        return all(watched.is_complete for watched in self._watched)

    def look(self, *, whole: bool = False) -> list[View]:
        """Ask each backend once, read what is new, and say what is known of each run.

        With `whole`, all states are asked for, and all logs on another machine are read.
        """
        fetched: dict[str, _Watched] = {}
        if not whole:  # the log that was read longest ago; none of a backend twice in a row
            due = [run for run in self._watched if run.is_due]
            for run in sorted(due, key=lambda run: run.read_at):
                if run.row.backend not in self._fetched:
                    fetched.setdefault(run.row.backend, run)
        self._fetched = fetched
        queried = [run for run in self._watched if run.row.backend not in fetched]
        rows = run_state.refresh([run.row for run in queried])
        for run, row in zip(queried, rows, strict=True):
            run.read(row, fetch=whole)
        for run in fetched.values():
            run.read(run.row, fetch=True)
        return [run.view() for run in self._watched]


class _Watched:
    def __init__(self, row: Run) -> None:
        self.row = row
        self._metrics = RunMetrics(row, most=_MAX_FIRST_READ)
        self._error = FirstError()
        self._lines = deque[LogLine](maxlen=_MAX_ERROR_LINES)
        self.read_at = -LOGS_AGAIN
        """When a log elsewhere was last read."""
        self._asked = False
        self._state = ""
        """Its state when its log was last read."""
        self._cause = ""
        self._slowest = ""

    @property
    def is_complete(self) -> bool:
        """Whether it has ended, and its log was read since."""
        return self._asked and State(self.row.state).final and self.row.state == self._state

    @property
    def is_due(self) -> bool:
        """Whether a log elsewhere should be read now: after a while, and once more at the end."""
        if not self._asked or self.is_complete or logs_are_here(self.row):
            return False
        return State(self.row.state).final or time.monotonic() >= self.read_at + LOGS_AGAIN

    def read(self, row: Run, *, fetch: bool) -> None:
        """Read what is new, and the cause if the run has just failed."""
        has_ended = State(row.state).final and not (self._asked and State(self.row.state).final)
        self._asked = True
        self.row = self._metrics.row = row
        here = logs_are_here(row)
        if fetch or here:
            if not here:
                self.read_at = time.monotonic()
                self._error = FirstError()
                self._lines.clear()
            self._metrics.refresh(fetch=fetch, heard=self._hear)
            self._state = row.state
        if has_ended:
            self._cause = run_diagnosis.brief(row) or ""

    def _hear(self, line: LogLine) -> None:
        if self._error.add(line):
            self._lines.append(line)
        if SLOW_RANK.match(line.text):
            self._slowest = line.text

    def view(self) -> View:
        folder = Path(self.row.folder)
        attempt = exit_records.attempt(folder) or 0
        runs = State(self.row.state) is State.RUNNING
        return View(
            self.row,
            self._metrics.progress(),
            attempt,
            tuple(exit_records.restarts(folder, upto=attempt)),
            tuple(self._lines),
            self._cause,
            tuple(self._metrics.problems),
            tuple(usage.read(folder, attempt)) if runs else (),
            self._slowest,
        )


def last_lines(error: Sequence[LogLine], count: int) -> list[str]:
    """The last lines of an error, each after its rank, without the marks below source lines."""
    texts = ((line, plain(line)) for line in error)
    return [f"{line.origin}{text}" for line, text in texts if text.strip(" ^~")][-count:]
