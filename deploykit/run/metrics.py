"""The numbers of a run: where its files and its log are, and what the readers find there.

The only place that reads metrics: `metrics`, `watch`, `wait` and `status` take them from here.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.job.decode import from_json
from deploykit.job.model import LogLine, State
from deploykit.lib import paths
from deploykit.lib.errors import DeploykitError
from deploykit.observe import logfiles
from deploykit.observe.metrics import length, progress
from deploykit.observe.metrics.files import MetricFiles
from deploykit.observe.metrics.length import Length
from deploykit.observe.metrics.log_reader import LogReader
from deploykit.observe.metrics.points import Point
from deploykit.observe.metrics.progress import Progress
from deploykit.observe.metrics.series import Collection, is_chosen, without_repeats
from deploykit.run.registry import Run

BRIEFLY = 1 << 14
"""Bytes at the end of a log that are read where only the last step is wanted."""
_LARGEST_JOB = 1 << 22
"""Bytes of ``job.json``."""


class RunMetrics:
    """What is read of one run, and more at each `refresh`; none of its lines is kept."""

    def __init__(self, row: Run, *, most: int | None = None, task: int | None = None) -> None:
        """`most` bytes at the end of each log; of a job array one task, by default the first."""
        self.row = row
        self.problems: list[str] = []
        """What could not be read."""
        self._most, self._task = most, task
        self._job = _job(Path(row.folder))
        folder = Path(row.folder)
        self._logs = logfiles.Logs(folder, logfiles.ALL, most)
        self._files = MetricFiles(folder, row.output, row.created, most)
        self._begin()

    def _begin(self) -> None:
        self.collection = Collection()
        self._reader = LogReader(self._job.patterns, self._job.length)

    def refresh(
        self, *, fetch: bool = True, heard: Callable[[LogLine], object] | None = None
    ) -> None:
        """Read what is new, as `new` does, for `collection` and `progress`."""
        for _ in self.new(fetch=fetch, heard=heard):
            pass

    def new(
        self, *, fetch: bool = True, heard: Callable[[LogLine], object] | None = None
    ) -> Iterator[Point]:
        """The points of log and files since the last call, as they are read; `heard` gets lines.

        A log that is not on this machine is read whole, and only with `fetch`.
        """
        if fetch and self.row.handle is not None and not logs_are_here(self.row):
            self._begin()
        lines = self._lines(fetch=fetch, heard=heard)
        yield from self.collection.with_each(self._reader.feed(lines))
        yield from self.collection.with_each(self._files.read())
        for problem in self._files.problems:
            self._note(problem)

    def whole(self, names: Sequence[str] = ()) -> Iterator[Point]:
        """All points, asking the service too; every step once. `names` are patterns of names."""
        every = itertools.chain(self.new(), self.final())
        return without_repeats(one for one in every if is_chosen(one.name, names))

    def final(self) -> list[Point]:
        """What the service that ran the job has extracted, where it offers that. Asks it."""
        engine = backend.find(self.row.backend)
        if self.row.handle is None or not backend.offers(engine, "metrics"):
            return []
        try:
            points = list(engine.metrics(self.row.handle))
        except DeploykitError as error:
            self._note(str(error))
            return []
        self.collection.add(points)
        return points

    def progress(self) -> Progress:
        """How far the run is, from all that was read so far."""
        self._add_bar()
        now = None if State(self.row.state).final else time.time()
        return progress.of(self.collection, self._reader, self._job.length, now)

    def _add_bar(self) -> None:
        """Read the current state of the bar of rank 0, which the log has only every ten seconds."""
        if (line := _bar_line(Path(self.row.folder))) is not None:
            for _ in self._reader.feed([line]):
                pass

    def _lines(
        self, *, fetch: bool, heard: Callable[[LogLine], object] | None
    ) -> Iterator[LogLine]:
        """The new lines, without those of other tasks of a job array; `heard` gets these too."""
        for line in self._new_lines(fetch=fetch):
            if heard is not None:
                heard(line)
            if line.task in {None, self._task}:
                yield line

    def _new_lines(self, *, fetch: bool) -> Iterator[LogLine]:
        if self.row.handle is None:
            return
        with self._noting():
            if logs_are_here(self.row):
                lines = self._logs.new(whole=State(self.row.state).final)
                self._choose_task(self._logs)
            elif fetch:
                lines = backend.find(self.row.backend).logs(self.row.handle, follow=False)
                if isinstance(lines, logfiles.Lines):
                    self._choose_task(lines.logs)
            else:
                return
            yield from lines

    def _choose_task(self, logs: logfiles.Logs) -> None:
        """Of a job array the first task that has logs, where none was chosen."""
        if self._task is None:
            self._task = logs.first_task()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except (DeploykitError, OSError) as error:
            self._note(f"the log: {error}")

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def logs_are_here(row: Run) -> bool:
    """Whether the log files of a run are in its folder on this machine, and complete."""
    engine = backend.find(row.backend)
    if backend.offers(engine, "logs_elsewhere") and row.handle is not None:
        return not engine.logs_elsewhere(row.handle)
    folder = Path(row.folder)
    return any(True for pattern in logfiles.ALL for _ in folder.glob(pattern))


def brief(row: Run) -> Progress:
    """How far a run is, from the end of what is on this machine. Asks no backend."""
    read = RunMetrics(row, most=BRIEFLY)
    read.refresh(fetch=False)
    return read.progress()


def _bar_line(folder: Path) -> LogLine | None:
    from datetime import UTC, datetime

    state = logfiles.bar(folder).strip("\n")
    if not state:
        return None
    moment = None
    with contextlib.suppress(OSError):
        moment = datetime.fromtimestamp((folder / logfiles.BAR).stat().st_mtime, UTC)
    return LogLine(state, rank=0, time=moment, bar=True)


class _Job:
    """What the job of a run says about its numbers."""

    def __init__(self, data: Any) -> None:
        job = data if isinstance(data, dict) else {}
        entry, own = job.get("entrypoint"), job.get("metrics")
        words = entry.get("args") if isinstance(entry, dict) else None
        self.length: Length = length.of(
            [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
        )
        self.patterns = {
            name: regex
            for name, regex in (own.items() if isinstance(own, dict) else ())
            if isinstance(regex, str)
        }


def _job(folder: Path) -> _Job:
    """The job as it was submitted; an empty one where it was not kept."""
    try:
        return _Job(from_json(paths.read_below(folder, backend.JOB, _LARGEST_JOB) or b"{}"))
    except ValueError:
        return _Job({})
