"""Log files merged by time as they are read, in little memory: a block of each file at a time.

A line that has no time follows the line before it, and no line overtakes one of its own file. Lines
are kept as text until they are asked for as `LogLine`: most are only sorted and printed.
"""

from __future__ import annotations

import re
import resource
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from operator import itemgetter, le
from pathlib import Path
from typing import IO

from deploykit.model import LogLine

_LINE = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) \[(rank|node) (\d{1,9})\] ?(.*)", re.DOTALL
)
_DAY = (
    r"\d{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    r"|(?:0[13578]|1[02])-31)"
)
_STAMP = rf"(?!0000){_DAY}T(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d\.\d{{3}}Z"
"""A time that exists."""
_STAMPED = re.compile(rf"{_STAMP} \[(?:rank|node) \d{{1,9}}\]", re.ASCII)
_WIDTH = len("2026-11-21T01:46:08.123Z")
_KEY = itemgetter(slice(0, _WIDTH))
"""Of an entry: texts of times sort as the times do."""
_BEFORE_ALL = "\0" * _WIDTH
_AFTER_ALL = "9999-12-31T23:59:59.999Z"
_HEAD = 60
"""Bytes at the start of a line that hold its time and rank."""
_BUDGET = 1 << 23
"""Bytes of all blocks together, unless there are more files than fit with `_SMALLEST` each."""
_SMALLEST, _LARGEST = 1 << 12, 1 << 18
"""Bytes of a block."""
_OPEN = 256
"""Files that stay open, at most; others are opened again for each block."""


def parse(text: str, node: int | None, task: int | None = None) -> LogLine:
    """A line of a log; time and rank are parsed where the node plane wrote them."""
    match = _LINE.fullmatch(text)
    if match is None:
        return LogLine(text, node, task=task)
    when, kind, number, rest = match.groups()
    try:
        moment = datetime.fromisoformat(when)
    except ValueError:  # the 45th of the 13th month
        return LogLine(text, node, task=task)
    bar = rest.startswith("\r") and len(rest) > 1  # entrypoints/deploykit_node/progress.py
    rank = int(number) if kind == "rank" else None
    return LogLine(rest[bar:], node, rank, moment, task, bar)


@dataclass(frozen=True)
class Part:
    """A part of a log file, in bytes; it begins and ends between lines, or with the file."""

    path: Path
    node: int | None
    task: int | None
    start: int
    stop: int

    @cached_property
    def plain(self) -> re.Pattern[str]:
        """Matches lines whose text in a pipe is what follows their time."""
        node = r"(?!)" if self.node is None or self.task is not None else rf"node {self.node}"
        rank = r"(?!)" if self.task is not None else r"rank (?:0|[1-9]\d{0,8})"
        return re.compile(rf"(?:{_STAMP} \[(?:{rank}|{node})\] [^\r\n]*\n)*+", re.ASCII)


class Batch:
    """Lines of several files that come before all lines of the next batch.

    An entry is a line with a time. Where the order is not that of the texts, it is a time, a
    newline, and lines that belong there.
    """

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._counts: list[tuple[Part, int]] = []
        self._plain = True

    def add(self, part: Part, entries: list[str], *, plain: bool) -> None:
        """Add entries of one file, sorted; `plain` if all of them match `Part.plain`."""
        self.entries += entries
        self._counts.append((part, len(entries)))
        self._plain = self._plain and plain

    def plain(self) -> str | None:
        """All lines as a pipe shows them; None where that takes more than leaving out the times."""
        if not self._plain:
            return None
        texts = [entry[_WIDTH + 1 :] for entry in sorted(self.entries, key=_KEY)]
        return "\n".join([*texts, ""])

    def lines(self) -> Iterator[LogLine]:
        """All lines, in their order."""
        parts = [part for part, count in self._counts for _ in range(count)]
        keys = list(map(_KEY, self.entries))
        for at in sorted(range(len(keys)), key=keys.__getitem__):
            entry, part = self.entries[at], parts[at]
            texts = entry.split("\n")
            for text in texts[entry[_WIDTH : _WIDTH + 1] == "\n" :]:
                yield parse(text, part.node, part.task)


def batches(parts: Sequence[Part], rank: int | None = None) -> Iterator[Batch]:
    """All lines of the files, or those of one rank. A later file's come after, at the same time."""
    size = max(_SMALLEST, min(_LARGEST, _BUDGET // max(1, len(parts))))
    opened = min(_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
    sources = [_Source(part, size, rank, stays_open=at < opened) for at, part in enumerate(parts)]
    try:
        while sources:
            for source in sources:
                source.fill()
            sources = [source for source in sources if source.entries or not source.done]
            if batch := _next_batch(sources):
                yield batch
    finally:
        for source in sources:
            source.close()


def _next_batch(sources: Sequence[_Source]) -> Batch | None:
    """What comes before everything that was not read yet."""
    ends = [(_KEY(one.entries[-1]), at) for at, one in enumerate(sources) if not one.done]
    horizon, last = min(ends, default=(None, 0))
    batch = Batch()
    for at, source in enumerate(sources):
        taken = len(source.entries)
        if horizon is not None:
            bisect = bisect_right if at <= last else bisect_left
            taken = bisect(source.entries, horizon, key=_KEY)
        if taken:
            batch.add(source.part, source.entries[:taken], plain=source.plain)
            del source.entries[:taken]
    return batch if batch.entries else None


def line_start(path: Path, at: int, size: int) -> int:
    """The first position after `at` where a line begins; `size` where there is none before."""
    with path.open("rb") as file:
        file.seek(at)
        while at < size and (data := file.read(min(_LARGEST, size - at))):
            if (found := data.find(b"\n")) >= 0:
                return at + found + 1
            at += len(data)
    return size


def line_end(path: Path, start: int, size: int) -> int | None:
    """The position after the last line end between `start` and `size`; None where there is none."""
    with path.open("rb") as file:
        while size > start:
            at = max(start, size - _LARGEST)
            file.seek(at)
            if (found := file.read(size - at).rfind(b"\n")) >= 0:
                return at + found + 1
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
        begins = file.read(min(size, _SMALLEST))
    for raw in ends.split(b"\n"):
        if stamp := _stamp(raw):
            return replace(part, start=at), stamp
        at += len(raw) + 1
    if any(map(_stamp, begins.split(b"\n"))):
        return replace(part, start=part.stop), _AFTER_ALL
    return replace(part, start=start), ""


def _stamp(line: bytes) -> str | None:
    text = line[:_HEAD].decode(errors="surrogateescape")
    return text[:_WIDTH] if _STAMPED.match(text) else None


class _Source:
    """Reads the part of a file block by block."""

    def __init__(self, part: Part, size: int, rank: int | None, *, stays_open: bool) -> None:
        self.part, self._size, self._at = part, size, part.start
        self.entries: list[str] = []
        self.plain = True
        """Whether all entries match `Part.plain`."""
        self._filled = 0
        """Entries after the last block was read."""
        self._rest = b""
        self._last = _BEFORE_ALL
        self._stays_open = stays_open
        self._file: IO[bytes] | None = None
        self._number = "" if rank is None else f"{rank}]"
        self._mark = None if rank is None else re.compile(rf"(?m)^\S{{24}} \[rank 0*{rank}\].*\n?")
        self.done = False
        """Whether all was read."""

    def fill(self) -> None:
        """Read on until there are as many entries again, or the part ends.

        All files are filled up to about the same time, so that a batch takes many lines of each.
        """
        while len(self.entries) * 2 <= self._filled and not self.done:
            data = self._rest + self._read()
            self.done = self._at >= self.part.stop
            end = len(data) if self.done else data.rfind(b"\n") + 1
            ready, self._rest = data[:end], data[end:]
            if ready:
                self._take(ready.decode(errors="surrogateescape"))
        if self.done:
            self.close()

    def _read(self) -> bytes:
        size = min(max(self._size, len(self._rest)), self.part.stop - self._at)
        try:
            file = self._file or self.part.path.open("rb", buffering=0)
        except FileNotFoundError:  # removed since it was listed
            self._at = self.part.stop
            return b""
        if self._stays_open:
            self._file = file
        with nullcontext() if self._stays_open else closing(file):
            file.seek(self._at)
            data = file.read(size)
        self._at = self._at + len(data) if data else self.part.stop
        return data

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take(self, block: str) -> None:
        """Add the lines of a block as entries."""
        if self._mark is not None:
            block = "".join(self._mark.findall(block)) if self._number in block else ""
        if not block:
            return
        is_whole = block.endswith("\n")
        lines = block[:-1].split("\n") if is_whole else block.split("\n")
        plain = is_whole and self.part.plain.fullmatch(block) is not None
        keys = [self._last, *map(_KEY, lines)]
        if not (plain and all(map(le, keys, keys[1:]))):
            plain = False
            lines = list(self._joined(lines))
        self.plain = plain and (self.plain or not self.entries)
        self.entries += lines
        self._last, self._filled = _KEY(lines[-1]), len(self.entries)

    def _joined(self, lines: Sequence[str]) -> Iterator[str]:
        """Entries in order: each line that has no time, or an earlier one, after the one before."""
        last, group = self._last, list[str]()
        for line in lines:
            if _STAMPED.match(line) and line[:_WIDTH] >= last:
                if group:
                    yield "\n".join([last, *group])
                last, group = line[:_WIDTH], []
            group.append(line)
        yield "\n".join([last, *group])
