"""The metrics of a run, from its log, its files and the service that ran it.

`metrics`, `watch`, `wait`, `status`, `report` and `sync` all read them here.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.job.model import LogLine, State
from deploykit.lib.errors import DeploykitError
from deploykit.observe import logfiles, stacks
from deploykit.observe.metrics import progress
from deploykit.observe.metrics.files import MetricFiles
from deploykit.observe.metrics.log_reader import LogReader
from deploykit.observe.metrics.points import Point
from deploykit.observe.metrics.progress import Progress
from deploykit.observe.metrics.series import Collection, is_chosen, without_repeats
from deploykit.run.registry import Run

BRIEFLY = 1 << 14
"""Bytes at the end of a log that are read if only the last step is wanted."""


class RunMetrics:
    """What is read of one run, and more at each `refresh`; none of its lines is kept."""

    def __init__(self, row: Run, *, most: int | None = None, task: int | None = None) -> None:
        """`most` bytes at the end of each log; of a job array one task, by default the first."""
        self.row = row
        self.problems: list[str] = []
        self._task = task
        job = row.job_data()
        self._length = progress.length_of((job.get("entrypoint") or {}).get("args") or [])
        self._patterns = job.get("metrics") or {}
        folder = Path(row.folder)
        self._logs = logfiles.Logs(folder, logfiles.ALL, most)
        self._files = MetricFiles(folder, row.output, row.created, most)
        self._begin()

    def _begin(self) -> None:
        self.collection = Collection()
        self._reader = LogReader(self._patterns, self._length.epochs)

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
        points = itertools.chain(self.new(), self.final())
        return without_repeats(point for point in points if is_chosen(point.name, names))

    def final(self) -> list[Point]:
        """Ask the service that ran the job for the metrics that it extracted, if it offers that."""
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
        folder = Path(self.row.folder)
        if state := logfiles.bar(folder).strip("\n"):  # the log has it only every ten seconds
            moment = None
            with contextlib.suppress(OSError):
                moment = datetime.fromtimestamp((folder / logfiles.BAR).stat().st_mtime, UTC)
            for _ in self._reader.feed([LogLine(state, rank=0, time=moment, bar=True)]):
                pass
        current = progress.of(self.collection, self._reader, self._length, time.time())
        # at the pace before a stall it would end soon, and it may never end
        if State(self.row.state).final or stacks.STALLED in self.row.reason:
            sources = {name: one for name, one in current.sources.items() if name != "left"}
            return replace(current, left=None, sources=sources)
        return current

    def _lines(
        self, *, fetch: bool, heard: Callable[[LogLine], object] | None
    ) -> Iterator[LogLine]:
        """The new lines, without those of other tasks of a job array; `heard` gets these too.

        The task is by default the first that has logs.
        """
        is_here = logs_are_here(self.row)
        if self.row.handle is None or not (is_here or fetch):
            return
        try:
            logs: logfiles.Logs | None = self._logs
            if is_here:
                lines = self._logs.new(whole=State(self.row.state).final)
            else:
                lines = backend.find(self.row.backend).logs(self.row.handle, follow=False)
                logs = lines.logs if isinstance(lines, logfiles.Lines) else None
            if self._task is None and logs is not None:
                self._task = logs.first_task()
            for line in lines:
                if heard is not None:
                    heard(line)
                if line.task in {None, self._task}:
                    yield line
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
