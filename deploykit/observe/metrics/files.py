"""The files of metrics that a run has written on this machine, read as they grow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from deploykit.lib import paths
from deploykit.lib.paths import is_address
from deploykit.observe.metrics import event_files, json_lines
from deploykit.observe.metrics.event_files import EventFile
from deploykit.observe.metrics.json_lines import JsonLines
from deploykit.observe.metrics.points import Point

_FOLDERS = ("source", "output")
"""Subfolders of a run folder in which programs write metrics."""
_DEEPEST = 6
"""Folders below one of them that are searched."""
_MOST_ENTRIES = 20_000
"""Files and folders that are looked at in one search."""
_MOST_FILES = 500
_AGAIN = 5.0
"""Seconds between two searches."""
_SKIPPED = {".deploykit", ".git", ".venv", "__pycache__", "node_modules", "wandb"}
_CLOCKS = 60
"""Seconds that the clocks of two machines may differ."""
_EVENTS = 256
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
        self._searched = -_AGAIN
        self.problems: list[str] = []
        """What could not be read."""

    def read(self) -> Iterator[Point]:
        """The points that were written since the last call, file by file."""
        if time.monotonic() >= self._searched + _AGAIN:
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
                    known = self._readers.get(path, (None, None))[0] == info.st_ino
                    if info.st_mtime >= self._created - _CLOCKS and not known:
                        self._begin(label, top, path, info)
                except OSError as error:
                    self._note(f"{path}: {error.strerror}")

    def _begin(self, label: str, top: Path, path: Path, info: os.stat_result) -> None:
        if len(self._readers) >= _MOST_FILES:
            return
        if path.name == json_lines.NAME:
            source = f"{label}/{path.relative_to(top).as_posix()}"
            at = 0 if self._most is None else max(0, info.st_size - self._most)
            self._readers[path] = info.st_ino, JsonLines(source, at)
        elif self._most is None or info.st_size <= self._most * _EVENTS:
            source = f"{label}/{path.parent.relative_to(top).as_posix()}".removesuffix("/.")
            self._readers[path] = info.st_ino, EventFile(source)
        else:
            self._note(f"{path.name} is too large to be read here")

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _walk(top: Path) -> Iterator[Path]:
    """Files of metrics below a folder, by name, without following links."""
    entries = 0
    for here, folders, files in os.walk(top):
        entries += len(folders) + len(files)
        if entries > _MOST_ENTRIES:
            return
        depth = len(Path(here).relative_to(top).parts)
        folders[:] = sorted(set(folders) - _SKIPPED) if depth < _DEEPEST else []
        for name in sorted(files):
            path = Path(here, name)
            is_events = event_files.NAME in name and not name.endswith(event_files.OWN)
            if (is_events or name == json_lines.NAME) and not path.is_symlink():
                yield path
