"""The files of metrics that a run has written on this machine, read as they grow."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path

from deploykit.job.decode import from_json
from deploykit.lib import paths
from deploykit.lib.paths import is_address
from deploykit.observe.metrics import tensorboard
from deploykit.observe.metrics.points import LONGEST_NAME, STEPS, Point, count, number, real
from deploykit.observe.metrics.tensorboard import EventFile

NAME = "metrics.jsonl"
CSV_NAMES = {"metrics.csv", "results.csv", "history.csv", "log.csv"}
"""As Lightning, Ultralytics and many scripts have it. Other CSV has neither step nor epoch."""
TIMES = ("time", "timestamp", "_timestamp", "wall_time")
_SINCE_THE_START = 10**9
"""Smaller times are seconds since the start of training (Ultralytics), not dates."""
_NOT_METRICS = {*STEPS, *TIMES, "epoch"}
_MAX_LINE_BYTES = 1 << 20
"""Bytes of a line; longer ones are skipped."""
_MAX_METRICS = 1000
"""Names in one line."""


class JsonLines:
    """One file, read as it grows. A file that became shorter or another one is read anew."""

    def __init__(self, source: str, at: int = 0) -> None:
        """Begin at the byte `at`."""
        self._source, self._at = source, at
        self._rest = b""

    def read(self, file: FileIO) -> Iterator[Point]:
        """The points of lines that were completed since the last call."""
        if os.fstat(file.fileno()).st_size < self._at:
            self._at, self._rest = 0, b""
        file.seek(self._at)
        while piece := file.read(_MAX_LINE_BYTES):
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                yield from self._points(line)
            if len(self._rest) > _MAX_LINE_BYTES:
                self._rest = b""
        self._at = file.tell()

    def _points(self, line: bytes) -> Iterator[Point]:
        """The numbers of a line that is a JSON object; none of any other line."""
        try:
            data = from_json(line)
        except ValueError:
            return
        if isinstance(data, dict):
            yield from _numbers(data, self._source)


class CsvRows(JsonLines):
    """The same for CSV. If the header changes, as Lightning's does, the file is read again."""

    _heading = b""
    _names: tuple[str, ...] = ()

    def read(self, file: FileIO) -> Iterator[Point]:
        file.seek(0)
        if file.read(len(self._heading)) != self._heading:
            self._at, self._rest, self._heading = 0, b"", b""
        return super().read(file)

    def _points(self, line: bytes) -> Iterator[Point]:
        try:
            cells = next(csv.reader([line.decode(errors="replace").strip()]), [])
            cells = [cell.strip() for cell in cells]
        except csv.Error:  # a field of more than 128 KiB
            return
        if not self._heading:
            self._heading, self._names = line + b"\n", tuple(cells)
        elif len(cells) == len(self._names) and not {*STEPS, "epoch"}.isdisjoint(self._names):
            row = zip(self._names, map(number, cells), strict=True)
            yield from _numbers(dict(row), self._source)


def _numbers(data: Mapping[str, object], source: str) -> Iterator[Point]:
    step = next((count(real(data.get(name))) for name in STEPS if name in data), None)
    time = next((_finite(data.get(name)) for name in TIMES if name in data), None)
    if time is not None and time < _SINCE_THE_START:
        time = None
    epoch = _finite(data.get("epoch"))
    for name, value in list(data.items())[:_MAX_METRICS]:
        number = real(value)
        if number is not None and name not in _NOT_METRICS:
            yield Point(name[:LONGEST_NAME], number, step, epoch, time, source=source)


def _finite(value: object) -> float | None:
    number = real(value)
    return number if number is not None and math.isfinite(number) else None


_FOLDERS = ("source", "output")
"""Subfolders of a run folder in which programs write metrics."""
_MAX_DEPTH = 6
"""Folders below one of them that are searched."""
_MAX_ENTRIES = 20_000
"""Files and folders that are looked at in one search."""
_MAX_FILES = 500
_SEARCH_SECONDS = 5.0
"""Seconds between two searches."""
_SKIPPED = {".deploykit", ".git", ".venv", "__pycache__", "node_modules", "wandb"}
_CLOCK_SECONDS = 60
"""Seconds that the clocks of two machines may differ."""
_EVENT_FILE_FACTOR = 256
"""An event file may be so many times as large as `most`: its records must be read in order."""


class MetricFiles:
    """The files in a run folder, and in its output folder where that is elsewhere."""

    def __init__(self, folder: Path, output: str, created: float, most: int | None = None) -> None:
        """Files older than `created` are of other runs. `most`: bytes at the end of each."""
        self._tops = {name: folder / name for name in _FOLDERS}
        if output and not is_address(output):
            self._tops["output"] = Path(output)
        self._created, self._most = created, most
        self._readers: dict[Path, tuple[int, JsonLines | EventFile]] = {}
        self._searched = -_SEARCH_SECONDS
        self.problems: list[str] = []
        """What could not be read."""

    def read(self) -> Iterator[Point]:
        """The points that were written since the last call, file by file."""
        if time.monotonic() >= self._searched + _SEARCH_SECONDS:
            self._searched = time.monotonic()
            self._search()
        for path, (_, reader) in self._readers.items():
            try:
                with paths.open_regular(path) as file:
                    yield from reader.read(file)
            except OSError as error:
                self._note(f"{path}: {error.strerror}")
            if isinstance(reader, EventFile) and reader.problem:
                self._note(reader.problem)

    def _search(self) -> None:
        """Make a reader for each file that is new, or another one than before."""
        for label, top in self._tops.items():
            for path in _walk(top):
                try:
                    info = path.stat()
                except OSError as error:
                    self._note(f"{path}: {error.strerror}")
                    continue
                known = self._readers.get(path, (None, None))[0] == info.st_ino
                is_old = info.st_mtime < self._created - _CLOCK_SECONDS
                if known or is_old or len(self._readers) >= _MAX_FILES:
                    continue
                if path.name == NAME:
                    source = f"{label}/{path.relative_to(top).as_posix()}"
                    at = 0 if self._most is None else max(0, info.st_size - self._most)
                    self._readers[path] = info.st_ino, JsonLines(source, at)
                elif path.name in CSV_NAMES:
                    source = f"{label}/{path.relative_to(top).as_posix()}"
                    self._readers[path] = info.st_ino, CsvRows(source)
                elif self._most is None or info.st_size <= self._most * _EVENT_FILE_FACTOR:
                    source = f"{label}/{path.parent.relative_to(top).as_posix()}"
                    self._readers[path] = info.st_ino, EventFile(source.removesuffix("/."))
                else:
                    self._note(f"{path.name} is too large to read")

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _walk(top: Path) -> Iterator[Path]:
    """Files of metrics below a folder, by name, without following links."""
    entries = 0
    for here, folders, files in os.walk(top):
        entries += len(folders) + len(files)
        if entries > _MAX_ENTRIES:
            return
        depth = len(Path(here).relative_to(top).parts)
        folders[:] = sorted(set(folders) - _SKIPPED) if depth < _MAX_DEPTH else []
        for name in sorted(files):
            path = Path(here, name)
            is_events = tensorboard.FILE_NAME in name and not name.endswith(tensorboard.OWN_ENDING)
            if (is_events or name in {NAME, *CSV_NAMES}) and not path.is_symlink():
                yield path
