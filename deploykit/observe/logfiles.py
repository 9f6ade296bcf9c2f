"""The log files of the node plane: one for each node, with time and rank before each line."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from deploykit.job.model import Handle, LogLine
from deploykit.lib import paths
from deploykit.lib.errors import NotFound
from deploykit.observe import log_merge
from deploykit.observe.log_merge import Batch, Part

BAR = "progress"
"""In a run folder: the current state of the progress bar of rank 0."""
ALL = ("logs/*.log", "tasks/*/logs/*.log")
"""In a run folder: the logs of a job, and those of the tasks of a job array."""
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
"""Seconds between two reads while following, of few files."""
_LOOKS = 1000.0
"""Files that are looked at in a second: they are on a folder that all nodes share."""
_WINDOWS, _WINDOW, _WINDOW_AT_LEAST = 1 << 22, 1 << 16, 1 << 12
"""Bytes at the ends of all files, and of each, that are read at first for their last lines."""


def whole(handle: Handle) -> Path:
    """The run folder. Raises NotFound where it was deleted."""
    folder = Path(handle.folder)
    if not folder.is_dir():
        raise NotFound(f"{handle.run} has no logs: its folder {folder} was deleted")
    return folder


def refusal(log: Path) -> str | None:
    """Why the script of a job ended before it started anything, from its log; else None."""
    try:
        refusals = _REFUSAL.findall(end(log))
    except OSError:
        return None
    return refusals[-1] if refusals else None


def end(log: Path) -> str:
    """The last `_END` bytes of a log. Raises OSError, also for what is not a regular file."""
    with paths.open_regular(log) as file:
        file.seek(max(0, log.stat().st_size - _END))
        return file.read(_END).decode(errors="replace")


def read(
    folder: Path,
    *,
    follow: bool,
    ended: Callable[[], bool],
    patterns: tuple[str, ...] = ("*.log",),
) -> Lines:
    """Lines of every log in `folder`, merged by time as far as they carry one.

    With `follow`, new lines as they arrive, from files that may not exist yet, until `ended()` is
    true and everything written before has been read. A last line without a newline is included.
    """
    return Lines(Logs(folder, patterns), ended if follow else None)


class Lines(Iterator[LogLine]):
    """The lines of log files on this machine, in batches or one by one; read as they are needed."""

    def __init__(self, logs: Logs, ended: Callable[[], bool] | None) -> None:
        self.logs, self._ended = logs, ended
        self._lines = (line for batch in self.batches() for line in batch.lines())

    def __next__(self) -> LogLine:
        return next(self._lines)

    def batches(self) -> Iterator[Batch]:
        """All lines, in batches."""
        while True:
            last = self._ended is None or self._ended()
            yield from self.logs.batches(whole=last)
            if last:
                return
            time.sleep(self.logs.pause)

    def tail(
        self, count: int, chosen: Callable[[Iterable[LogLine]], Iterator[LogLine]]
    ) -> list[LogLine]:
        """The last `count` of the lines that `chosen` lets through; what follows is read next.

        Files are read from their ends. `chosen` is called again each time more of them is needed;
        it is given all lines in their order, or the last ones.
        """
        return self.logs.tail(count, chosen, whole=self._ended is None)


def bar(folder: Path) -> str:
    """The current state of the progress bar of rank 0; empty where there is none."""
    return (paths.read_below(folder, BAR, _LONGEST_BAR) or b"").decode(errors="replace")


class Logs:
    """The log files in `folder` whose names match `patterns`, read as they grow.

    With `most`, of a file that is longer at first only that many bytes at its end. With `rank`,
    `node` or `task`, only lines of these; other lines are left out before they are sorted.
    """

    def __init__(
        self, folder: Path, patterns: tuple[str, ...] = ("*.log",), most: int | None = None
    ) -> None:
        self._folder, self._patterns, self._most = folder, patterns, most
        self._files: dict[Path, _File] = {}
        self.rank: int | None = None
        self.node: int | None = None
        self.task: int | None = None

    @property
    def pause(self) -> float:
        """Seconds until the files are to be looked at again; the more files, the longer."""
        return max(_PAUSE, len(self._files) / _LOOKS)

    def new(self, *, whole: bool = False) -> Iterator[LogLine]:
        """The lines since the last call, merged by time as far as they carry one.

        With `whole`, last lines without a newline are included.
        """
        batches = self.batches(whole=whole)
        return (line for batch in batches for line in batch.lines())

    def batches(self, *, whole: bool = False) -> Iterator[Batch]:
        """The same in batches. What was there at the call counts as read."""
        parts = [file.next(whole=whole) for file in self._chosen()]
        return log_merge.batches([part for part in parts if part.start < part.stop], self.rank)

    def first_task(self) -> int | None:
        """The lowest task of a job array with a log that is not empty; None: there is none."""
        files = [file for file in self._chosen() if file.task is not None]
        return min((file.task or 0 for file in files if file.path.stat().st_size), default=None)

    def tail(
        self,
        count: int,
        chosen: Callable[[Iterable[LogLine]], Iterator[LogLine]],
        *,
        whole: bool,
    ) -> list[LogLine]:
        """See `Lines.tail`."""
        parts = [file.next(whole=whole) for file in self._chosen()]
        window = max(_WINDOW_AT_LEAST, min(_WINDOW, _WINDOWS // max(1, len(parts))))
        while True:
            ends = [log_merge.end_of(part, window) for part in parts]
            cut = [first for _, first in ends if first is not None]
            # a single file whose lines have no time, before those of all others, hides nothing
            since = None if cut in ([], [""]) else max(cut)
            lines = _Late(log_merge.batches([part for part, _ in ends], self.rank), since)
            last = deque((line for line in chosen(lines) if lines.late), count)
            if len(last) == count or not cut:
                return list(last)
            window *= 4

    def _chosen(self) -> list[_File]:
        """The files, without a pipe or a broken link in the place of one."""
        names = (path for pattern in self._patterns for path in self._folder.glob(pattern))
        files = [
            self._files.setdefault(path, _File(path, self._most))
            for path in sorted(names, key=_by_number)
            if path.is_file()
        ]
        return [
            file
            for file in files
            if self.node in {None, file.node} and self.task in {None, file.task}
        ]


class _Late:
    """The lines of batches; `late` once all lines since a time are among them."""

    def __init__(self, batches: Iterator[Batch], since: str | None) -> None:
        self._batches = batches
        self._since = datetime.fromisoformat(since) if since else _BEGINNING
        self.late = since is None

    def __iter__(self) -> Iterator[LogLine]:
        for batch in self._batches:
            for line in batch.lines():
                self.late = self.late or (line.time is not None and line.time > self._since)
                yield line


def _by_number(path: Path) -> tuple[int, str]:
    match = _NODE.fullmatch(path.name)
    return (int(match[1]) if match else -1, path.name)


class _File:
    """How far a file was read."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        match = _NODE.fullmatch(path.name)
        self.path, self.node = path, int(match[1]) if match else None
        task = _TASK.search(str(path))
        self.task = int(task[1]) if task else None
        self._at = self._searched = 0
        if most is not None and (size := path.stat().st_size) > most:
            self._at = log_merge.line_start(path, size - most, size)

    def next(self, *, whole: bool) -> Part:
        """What was written since the last call: complete lines; with `whole`, everything."""
        size, start = self.path.stat().st_size, self._at
        if whole:
            self._at = max(size, start)
        elif size > max(self._searched, start):
            self._at = log_merge.line_end(self.path, max(self._searched, start), size) or start
            self._searched = size
        return Part(self.path, self.node, self.task, start, self._at)
