"""The log files of the node plane: one for each node, with time and rank before each line."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from deploykit import paths
from deploykit.errors import NotFound
from deploykit.model import Handle, LogLine

BAR = "progress"
"""In a run folder: the current state of the progress bar of rank 0."""
ALL = ("logs/*.log", "tasks/*/logs/*.log")
"""In a run folder: the logs of a job, and those of the tasks of a job array."""
_LINE = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) \[(rank|node) (\d{1,9})\] ?(.*)", re.DOTALL
)
_NODE = re.compile(r"node-(\d{1,9})\.log")
_TASK = re.compile(r"/tasks/(\d{1,9})/logs/[^/]+$")
_REFUSAL = re.compile(r"(?m)^deploykit: (the job cannot start: .{1,1000})$")
"""What the script of a job prints before it ends with 78: a module, `setup`, an environment."""
_END = 1 << 16
"""Bytes at the end of a log in which that is looked for."""
_BEGINNING = datetime.min.replace(tzinfo=UTC)
_LONGEST_BAR = 1 << 17
"""Bytes of the state of a progress bar."""
_PAUSE = 0.2
"""Seconds between two reads while following."""


def whole(handle: Handle) -> Path:
    """The run folder. Raises NotFound where it was deleted."""
    folder = Path(handle.folder)
    if not folder.is_dir():
        raise NotFound(f"{handle.run} has no logs: its folder {folder} was deleted")
    return folder


def parse(text: str, node: int | None) -> LogLine:
    """A line of a log; time and rank are parsed where the node plane wrote them."""
    match = _LINE.fullmatch(text)
    if match is None:
        return LogLine(text, node)
    when, kind, number, rest = match.groups()
    try:
        moment = datetime.fromisoformat(when)
    except ValueError:  # the 45th of the 13th month
        return LogLine(text, node)
    bar = rest.startswith("\r") and len(rest) > 1  # entrypoints/deploykit_node/progress.py
    rank = int(number) if kind == "rank" else None
    return LogLine(rest[bar:], node, rank, moment, bar=bar)


def refusal(log: Path) -> str | None:
    """Why the script of a job ended before it started anything, from its log; else None."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _END))
            found = _REFUSAL.findall(file.read(_END).decode(errors="replace"))
    except OSError:
        return None
    return found[-1] if found else None


def read(
    folder: Path,
    *,
    follow: bool,
    ended: Callable[[], bool],
    patterns: tuple[str, ...] = ("*.log",),
) -> Iterator[LogLine]:
    """Lines of every log in `folder`, merged by time as far as they carry one.

    With `follow`, new lines as they arrive, from files that may not exist yet, until `ended()` is
    true and everything written before has been read. A last line without a newline is included.
    """
    logs = Logs(folder, patterns)
    while True:
        last = not follow or ended()
        yield from logs.new(whole=last)
        if last:
            return
        time.sleep(_PAUSE)


def bar(folder: Path) -> str:
    """The current state of the progress bar of rank 0; empty where there is none."""
    return (paths.read_below(folder, BAR, _LONGEST_BAR) or b"").decode(errors="replace")


class Logs:
    """The log files in `folder` whose names match `patterns`, read as they grow.

    With `most`, of a file that is longer at first only that many bytes at its end.
    """

    def __init__(
        self, folder: Path, patterns: tuple[str, ...] = ("*.log",), most: int | None = None
    ) -> None:
        self._folder, self._patterns, self._most = folder, patterns, most
        self._tails: dict[Path, _Tail] = {}

    def new(self, *, whole: bool = False) -> Iterator[LogLine]:
        """The lines since the last call, merged by time as far as they carry one.

        With `whole`, last lines without a newline are included.
        """
        fresh = []
        names = (path for pattern in self._patterns for path in self._folder.glob(pattern))
        for path in sorted(names, key=_by_number):
            tail = self._tails.setdefault(path, _Tail(path, self._most))
            fresh.append(tail.lines(whole=whole))
        return _merge(fresh)


def _by_number(path: Path) -> tuple[int, str]:
    match = _NODE.fullmatch(path.name)
    return (int(match[1]) if match else -1, path.name)


def _merge(files: list[list[LogLine]]) -> Iterator[LogLine]:
    """All lines by time; a line without a time follows the previous line of its file."""
    keyed = []
    for lines in files:
        last = _BEGINNING
        for line in lines:
            last = line.time or last
            keyed.append((last, line))
    for _, line in sorted(keyed, key=lambda pair: pair[0]):
        yield line


class _Tail:
    """Reads a file as it grows."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        match = _NODE.fullmatch(path.name)
        self._path, self._node = path, int(match[1]) if match else None
        task = _TASK.search(str(path))
        self._task = int(task[1]) if task else None
        size = path.stat().st_size if most is not None else 0
        self._at = max(0, size - (most or size))
        self._cut = self._at > 0
        """Whether the next line is incomplete at its beginning."""
        self._rest = b""

    def lines(self, *, whole: bool) -> list[LogLine]:
        """Complete lines written since the last call; with `whole`, also an incomplete last one."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        *ready, self._rest = (self._rest + data).split(b"\n")
        if self._cut and ready:
            del ready[0]
            self._cut = False
        if whole and self._rest:
            ready.append(self._rest)
            self._rest = b""
        lines = (parse(line.decode(errors="surrogateescape"), self._node) for line in ready)
        return [line if self._task is None else replace(line, task=self._task) for line in lines]
