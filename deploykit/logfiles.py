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
_STEP = r"(?i)\b((?:global )?step|iter(?:ation)?|epoch)s?[ =:#\[]{1,3}(\d{1,12}(?:/\d{1,12})?)\b"
_TAIL = 1 << 14
"""Bytes at the end of a log in which the last step is looked for."""
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
    tails: dict[Path, _Tail] = {}
    while True:
        last = not follow or ended()
        fresh = []
        names = (path for pattern in patterns for path in folder.glob(pattern))
        for path in sorted(names, key=_by_number):
            tail = tails.setdefault(path, _Tail(path))
            fresh.append(tail.lines(whole=last))
        yield from _merge(fresh)
        if last:
            return
        time.sleep(_PAUSE)


def bar(folder: Path) -> str:
    """The current state of the progress bar of rank 0; empty where there is none."""
    return (paths.read_below(folder, "progress", _LONGEST_BAR) or b"").decode(errors="replace")


def last_step(folder: Path) -> str:
    """The last step that the newest log names, such as ``step 120/500``; else empty."""
    newest = max(folder.glob("logs/*.log"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return ""
    with newest.open("rb") as file:
        file.seek(max(0, newest.stat().st_size - _TAIL))
        found = re.findall(_STEP, file.read(_TAIL).decode(errors="replace"))
    return f"{found[-1][0].lower()} {found[-1][1]}" if found else ""


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

    def __init__(self, path: Path) -> None:
        match = _NODE.fullmatch(path.name)
        self._path, self._node = path, int(match[1]) if match else None
        task = _TASK.search(str(path))
        self._task = int(task[1]) if task else None
        self._at = 0
        self._rest = b""

    def lines(self, *, whole: bool) -> list[LogLine]:
        """Complete lines written since the last call; with `whole`, also an incomplete last one."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        *ready, self._rest = (self._rest + data).split(b"\n")
        if whole and self._rest:
            ready.append(self._rest)
            self._rest = b""
        lines = (parse(line.decode(errors="surrogateescape"), self._node) for line in ready)
        return [line if self._task is None else replace(line, task=self._task) for line in lines]
