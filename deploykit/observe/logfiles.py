"""The log files of the node plane: one for each node, with time and rank before each line.

Files are merged by time as they are read, in little memory: a block of each file at a time. A line
without a time follows the line before it, and no line overtakes one of its own file. Lines are kept
as text until they are asked for as `LogLine`: most are only sorted and printed. Times and texts are
two lists, since a pair for each line would take as long as sorting them.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from deploykit.job.model import Handle, LogLine
from deploykit.lib import paths
from deploykit.lib.errors import NotFound

_STAMP = (
    r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
    r"T(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d\.\d{3}Z"
)
_LINE = re.compile(rf"({_STAMP}) \[(rank|node) (\d{{1,9}})\] ?(.*)", re.DOTALL | re.ASCII)
_STAMPED = re.compile(rf"{_STAMP} \[(?:rank|node) \d{{1,9}}\]", re.ASCII)
_NUMBER = r"(?:0|[1-9]\d{0,8})"
_PLAIN = re.compile(rf"\n({_STAMP}) (?=\[rank {_NUMBER}\] )", re.ASCII)
_PLAIN_OR_NODE = re.compile(rf"\n({_STAMP}) (?=\[(?:rank|node) {_NUMBER}\] )", re.ASCII)
"""Split lines whose text in a pipe is what follows their time, if the node is that of the file."""
_WIDTH = len("2026-11-21T01:46:08.123Z")
_BEFORE_ALL = ""
_AFTER_ALL = "9999-12-31T23:59:59.999Z"
_HEAD_BYTES = 60
"""Bytes at the start of a line that hold its time and rank."""
_ALL_BLOCKS_BYTES = 1 << 23
"""Bytes of all blocks together, unless there are more files than fit with `_MIN_BLOCK` each."""
_MIN_BLOCK, _MAX_BLOCK = 1 << 12, 1 << 18
"""Bytes of a block."""
BAR = "progress"
"""In a run folder: the current state of the progress bar of rank 0."""
ALL = ("logs/*.log", "tasks/*/logs/*.log")
"""In a run folder: the logs of a job, and those of the tasks of a job array."""
_NODE = re.compile(r"node-(\d{1,9})\.log")
_TASK = re.compile(r"/tasks/(\d{1,9})/logs/[^/]+$")
_REFUSAL = re.compile(r"(?m)^deploykit: (the job cannot start: .{1,1000})$")
"""What the script of a job prints before it ends with 78: a module, `setup`, an environment."""
_END_BYTES = 1 << 16
"""Bytes at the end of a log in which that is looked for."""
_BEGINNING = datetime.min.replace(tzinfo=UTC)
_MAX_BAR_BYTES = 1 << 17
"""Bytes of the state of a progress bar."""
_PAUSE_SECONDS = 0.2
"""Seconds between two reads while following, of few files."""
_LOOKS_PER_SECOND = 1000.0
"""Files that are looked at in a second: they are on a folder that all nodes share."""
_WINDOWS, _WINDOW, _MIN_WINDOW = 1 << 22, 1 << 16, 1 << 12
"""Bytes at the ends of all files, and of each, that are read at first for their last lines."""


def parse(text: str, node: int | None, task: int | None = None) -> LogLine:
    """Parse a line of a log; time and rank are those written by the node plane, if any."""
    match = _LINE.fullmatch(text)
    if match is None:
        return LogLine(text, node, task=task)
    when, kind, number, rest = match.groups()
    bar = rest.startswith("\r") and len(rest) > 1  # entrypoints/deploykit_node/relay.py
    rank = int(number) if kind == "rank" else None
    return LogLine(rest[bar:], node, rank, _moment(when), task, bar)


def _moment(stamp: str) -> datetime | None:
    """The time of a stamp; None for the 30th of February."""
    try:
        return datetime.fromisoformat(stamp)
    except ValueError:
        return None


@dataclass(frozen=True)
class Part:
    """A part of a log file, in bytes; it begins and ends between lines, or with the file."""

    path: Path
    node: int | None
    task: int | None
    start: int
    stop: int


class Batch:
    """Lines of several files that come before all lines of the next batch.

    An entry is a time and the rest of a line; or a time, as text, and after a newline whole lines
    that belong there.
    """

    def __init__(self) -> None:
        self._times: list[str] = []
        self._texts: list[str] = []
        self._counts: list[tuple[Part, int]] = []
        self._plain = True

    def __len__(self) -> int:
        return len(self._times)

    def add(self, part: Part, times: list[str], texts: list[str], *, plain: bool) -> None:
        """Add entries of one file, sorted; `plain` if a pipe shows each without the time."""
        self._times += times
        self._texts += texts
        self._counts.append((part, len(times)))
        self._plain = self._plain and plain

    def plain(self) -> str | None:
        """All lines as a pipe shows them; None if that takes more than omitting the times."""
        if not self._plain:
            return None
        time = partial(next, iter(self._times))  # given a text, `next` takes it for its default
        return "\n".join([*sorted(self._texts, key=time), ""])

    def lines(self) -> Iterator[LogLine]:
        """All lines, in order."""
        parts = [part for part, count in self._counts for _ in range(count)]
        for at in sorted(range(len(parts)), key=self._times.__getitem__):
            text, part = self._texts[at], parts[at]
            whole = text[1:].split("\n") if text[:1] == "\n" else [f"{self._times[at]} {text}"]
            for line in whole:
                yield parse(line, part.node, part.task)


def batches(parts: Sequence[Part], rank: int | None = None) -> Iterator[Batch]:
    """All lines of the files, or of one rank; at the same time, in the order of the files."""
    size = max(_MIN_BLOCK, min(_MAX_BLOCK, _ALL_BLOCKS_BYTES // max(1, len(parts))))
    sources = [_Source(part, size, rank) for part in parts]
    while sources:
        for source in sources:
            source.fill()
        sources = [source for source in sources if source.times or not source.done]
        if batch := _next_batch(sources):
            yield batch


def _next_batch(sources: Sequence[_Source]) -> Batch:
    """The lines that come before everything unread."""
    ends = [(one.times[-1], at) for at, one in enumerate(sources) if not one.done]
    horizon, last = min(ends, default=(None, 0))
    batch = Batch()
    for at, source in enumerate(sources):
        taken = len(source.times)
        if horizon is not None:
            taken = (bisect_right if at <= last else bisect_left)(source.times, horizon)
        if taken:
            batch.add(source.part, source.times[:taken], source.texts[:taken], plain=source.plain)
            del source.times[:taken], source.texts[:taken]
    return batch


def line_start(path: Path, at: int, size: int) -> int:
    """The first position after `at` where a line begins; `size` if there is none before it."""
    with path.open("rb") as file:
        file.seek(at)
        while at < size and (data := file.read(min(_MAX_BLOCK, size - at))):
            if (offset := data.find(b"\n")) >= 0:
                return at + offset + 1
            at += len(data)
    return size


def line_end(path: Path, start: int, size: int) -> int | None:
    """The position after the last line end between `start` and `size`, if any."""
    with path.open("rb") as file:
        while size > start:
            at = max(start, size - _MAX_BLOCK)
            file.seek(at)
            if (offset := file.read(size - at).rfind(b"\n")) >= 0:
                return at + offset + 1
            size = at
    return None


def end_of(part: Part, size: int) -> tuple[Part, str | None]:
    """The last lines of a part, about `size` bytes, and the time of the first one.

    None says that it is the whole part. An empty text says that no line has a time, as far as the
    first and last bytes tell: all its lines come before those of other files.
    """
    if part.stop - part.start <= size:
        return part, None
    start = line_start(part.path, part.stop - size, part.stop)
    with part.path.open("rb") as file:
        file.seek(start)
        at, ends = start, file.read(part.stop - start)
        file.seek(part.start)
        begins = file.read(min(size, _MIN_BLOCK))
    for raw in ends.split(b"\n"):
        if stamp := _stamp(raw):
            return replace(part, start=at), stamp
        at += len(raw) + 1
    if any(map(_stamp, begins.split(b"\n"))):
        return replace(part, start=part.stop), _AFTER_ALL
    return replace(part, start=start), ""


def _stamp(line: bytes) -> str | None:
    text = line[:_HEAD_BYTES].decode(errors="surrogateescape")
    return text[:_WIDTH] if _STAMPED.match(text) and _moment(text[:_WIDTH]) else None


class _Source:
    """Reads the part of a file block by block."""

    def __init__(self, part: Part, size: int, rank: int | None) -> None:
        self.part, self._size, self._at = part, size, part.start
        self.times: list[str] = []
        self.texts: list[str] = []
        """Of the entries of a `Batch`."""
        self.plain = True
        """Whether a pipe shows each entry without the time."""
        self.done = False
        """Whether all was read."""
        self._filled = 0
        """Entries after the last block was read."""
        self._rest = b""
        self._last = _BEFORE_ALL
        self._number = "" if rank is None else f"{rank}]"
        self._mark = None if rank is None else re.compile(rf"(?m)^\S{{24}} \[rank 0*{rank}\].*\n?")

    def fill(self) -> None:
        """Read on until there are as many entries again, or the part ends.

        All files are filled up to about the same time, so that a batch takes many lines of each.
        """
        while len(self.times) * 2 <= self._filled and not self.done:
            data = self._rest + self._read()
            self.done = self._at >= self.part.stop
            end = len(data) if self.done else data.rfind(b"\n") + 1
            ready, self._rest = data[:end], data[end:]
            block = ready.decode(errors="surrogateescape")
            if self._mark is not None:
                block = "".join(self._mark.findall(block)) if self._number in block else ""
            if block:
                self._take(block)

    def _read(self) -> bytes:
        """The next block. The file is not kept open: there may be thousands."""
        size = min(max(self._size, len(self._rest)), self.part.stop - self._at)
        try:
            with self.part.path.open("rb", buffering=0) as file:
                file.seek(self._at)
                data = file.read(size)
        except FileNotFoundError:  # removed since it was listed
            data = b""
        self._at = self._at + len(data) if data else self.part.stop
        return data

    def _take(self, block: str) -> None:
        """Add the lines of a block as entries."""
        times, texts = self._split(block)
        plain = bool(times) and self._last <= times[0] and times == sorted(times)
        if not plain:
            entries = list(self._joined(block.removesuffix("\n").split("\n")))
            times, texts = [time for time, _ in entries], [text for _, text in entries]
        self.plain = plain and (self.plain or not self.times)
        self.times += times
        self.texts += texts
        self._last, self._filled = times[-1], len(self.times)

    def _split(self, block: str) -> tuple[list[str], list[str]]:
        """Times and texts of lines that a pipe shows without their time; else none.

        Lines of a launcher are among them if all are of the file's own node.
        """
        if self.part.task is not None or "\r" in block or not block.endswith("\n"):
            return [], []
        own = block.count("Z [node ") == block.count(f"Z [node {self.part.node}] ")
        pieces = (_PLAIN_OR_NODE if own else _PLAIN).split(f"\n{block[:-1]}")
        times, texts = pieces[1::2], pieces[2::2]
        is_whole = not pieces[0] and "\n" not in "".join(texts)  # faster than counting lines
        return (times, texts) if is_whole else ([], [])

    def _joined(self, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Entries in order: each line that has no time, or an earlier one, after the one before."""
        last, group = self._last, list[str]()
        for line in lines:
            if _STAMPED.match(line) and line[:_WIDTH] >= last:
                if group:
                    yield last, "\n".join(["", *group])
                last, group = line[:_WIDTH], []
            group.append(line)
        yield last, "\n".join(["", *group])


def whole(handle: Handle) -> Path:
    """The run folder. Raises NotFound if it was deleted."""
    folder = Path(handle.folder)
    if not folder.is_dir():
        raise NotFound(f"{handle.run} has no logs: its folder {folder} was deleted")
    return folder


def refusal(log: Path) -> str | None:
    """Why the script of a job ended before starting anything, according to its log."""
    try:
        refusals = _REFUSAL.findall(end(log))
    except OSError:
        return None
    return refusals[-1] if refusals else None


def end(log: Path) -> str:
    """The last `_END_BYTES` bytes of a log. Raises OSError, also for what is not a regular file."""
    with paths.open_regular(log) as file:
        file.seek(max(0, log.stat().st_size - _END_BYTES))
        return file.read(_END_BYTES).decode(errors="replace")


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
    """The lines of log files on this machine, in batches or one by one, read on demand."""

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
    """The current state of the progress bar of rank 0; empty if there is none."""
    return (paths.read_below(folder, BAR, _MAX_BAR_BYTES) or b"").decode(errors="replace")


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
        """Seconds until the next look at the files; the more files, the longer."""
        return max(_PAUSE_SECONDS, len(self._files) / _LOOKS_PER_SECOND)

    def new(self, *, whole: bool = False) -> Iterator[LogLine]:
        """The lines since the last call, merged by time as far as they carry one.

        With `whole`, last lines without a newline are included.
        """
        batches = self.batches(whole=whole)
        return (line for batch in batches for line in batch.lines())

    def batches(self, *, whole: bool = False) -> Iterator[Batch]:
        """The same in batches. What was there at the call counts as read."""
        parts = [file.next(whole=whole) for file in self._chosen()]
        return batches([part for part in parts if part.start < part.stop], self.rank)

    def first_task(self) -> int | None:
        """The lowest task of a job array with a non-empty log, if any."""
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
        window = max(_MIN_WINDOW, min(_WINDOW, _WINDOWS // max(1, len(parts))))
        while True:
            ends = [end_of(part, window) for part in parts]
            cut = [first for _, first in ends if first is not None]
            # a single file whose lines have no time, before those of all others, hides nothing
            since = None if cut in ([], [""]) else max(cut)
            lines = _Late(batches([part for part, _ in ends], self.rank), since)
            last = deque((line for line in chosen(lines) if lines.late), count)
            if len(last) == count or not cut:
                return list(last)
            window *= 4

    def _chosen(self) -> list[_File]:
        """The selected regular files."""
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
            self._at = line_start(path, size - most, size)

    def next(self, *, whole: bool) -> Part:
        """What was written since the last call: complete lines; with `whole`, everything."""
        size, start = self.path.stat().st_size, self._at
        if whole:
            self._at = max(size, start)
        elif size > max(self._searched, start):
            self._at = line_end(self.path, max(self._searched, start), size) or start
            self._searched = size
        return Part(self.path, self.node, self.task, start, self._at)
