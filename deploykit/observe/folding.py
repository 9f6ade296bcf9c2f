"""Fold logs for people: torchrun's own messages are hidden, and each traceback is shown once.

After a user's error torchrun writes some forty lines of its own, and every rank that fails in the
same way prints the same traceback. Under a warning PyTorch may print thirty frames of its C++ code,
even where a run succeeds and only its nodes end one after the other. Lines of programs are never
changed or lost otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from deploykit.job.model import LogLine

_START = "Traceback (most recent call last):"
_RANK = re.compile(r"\[rank\d+\]:\s?")
"""What torch writes before each line of an exception that ends a rank."""
_CHAINED = ("During handling of the above", "The above exception was")
_AGENT = re.compile(
    r"[WE]\d{4} [\d:.]+ +\d+ torch/distributed/elastic/"
    r"|\[W\d{4} [\d:.]+ TCPStore\.cpp:\d+\] \[c10d\] (?:recvValueWithTimeout|sendBytes) failed"
)
"""What torchrun says on a node, also when the node with its store ends a second earlier."""
_SUMMARY = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
_FRAME = re.compile(r"frame #\d+: |Exception raised from \S+ at ")
"""C++ below a message of PyTorch (c10::Error)."""
_BEGINS = (
    "Traceback (most recent call last",
    "torch/distributed/elastic/",
    " TCPStore.cpp:",
    "Exception raised from ",
)
"""Parts of what is folded, and `_FRAME`. One after the other is faster than a pattern of all."""
_RULE = re.compile(r"=+")
_SUMMARY_RULES = 2
"""Torchrun's summary is between two rules of equals signs."""
_MAX_TRACEBACK_LINES = 1000
"""Lines of a traceback: longer ones are shown as they come."""
_BAR_EVERY = timedelta(seconds=10)
"""Between two states of a progress bar that are shown; a log may have more, for curves."""
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")
Author = tuple[int | None, int | None, int | None]


class Folding:
    """Folds the lines of one run; `hidden` counts the hidden lines so far."""

    def __init__(self) -> None:
        self.hidden = 0
        self._blocks: dict[Author, list[LogLine]] = {}
        """Incomplete tracebacks by task, node and rank."""
        self._rules: dict[Author, int] = {}
        """Rules seen so far of each incomplete summary of torchrun."""
        self._bars: dict[Author, datetime] = {}
        """The time of the last shown state of a progress bar."""
        self._in_frames: set[Author] = set()
        """Authors whose last line was a C++ frame."""
        self._first: dict[tuple[str, ...], LogLine] = {}
        """The last line of each printed traceback, by its text without numbers."""

    def fold(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Yield the lines to show, in order; a traceback once its last line is known."""
        yield from self.feed(lines)
        yield from self.rest()

    def feed(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Like `fold` for some of the lines: a traceback may end in the next ones."""
        for line in lines:
            author = line.task, line.node, line.rank
            if line.bar:
                if self._is_due(line, author):
                    yield line
                continue
            yield from self._next(line, author, plain(line))

    def _is_due(self, line: LogLine, author: Author) -> bool:
        """Return whether to show this state of a bar, as the last shown one is old enough."""
        last = self._bars.get(author)
        if line.time and last and line.time - last < _BAR_EVERY:
            return False
        if line.time:
            self._bars[author] = line.time
        return True

    def rest(self) -> Iterator[LogLine]:
        """The lines of incomplete tracebacks."""
        for block in self._blocks.values():
            yield from block

    @property
    def is_idle(self) -> bool:
        """Whether the next line is shown unchanged unless something to fold begins there."""
        return not (self._blocks or self._rules or self._in_frames)

    def _next(self, line: LogLine, author: Author, text: str) -> Iterator[LogLine]:
        if author in self._blocks:
            yield from self._continue(line, author, text)
        elif text == _START:
            self._blocks[author] = [line]
        elif author in self._rules:
            self._hide([line])
            self._rules[author] += bool(_RULE.fullmatch(text))
            if self._rules[author] == _SUMMARY_RULES:
                del self._rules[author]
        elif line.rank is None and _AGENT.match(text):
            self._hide([line])
        elif _FRAME.match(text) or (not text and author in self._in_frames):
            self._in_frames.add(author)
            self._hide([line])
        else:
            self._in_frames.discard(author)
            yield line

    def _continue(self, line: LogLine, author: Author, text: str) -> Iterator[LogLine]:
        block = self._blocks[author]
        goes_on = not text or text.startswith((" ", _START, *_CHAINED))
        block.append(line)
        if goes_on and len(block) <= _MAX_TRACEBACK_LINES:
            return
        del self._blocks[author]
        if line.rank is None and text.startswith(_SUMMARY):
            self._hide(block)
            self._rules[author] = 0
            return
        key = tuple(_VARIES.sub("N", plain(line)) for line in block)
        first = self._first.setdefault(key, line)
        if first is line or first.rank == line.rank:
            yield from block
        else:  # an equal one was shown before
            self._hide(block[1:])
            yield line._replace(text=f"{text}  (same traceback as rank {first.rank})")

    def _hide(self, lines: list[LogLine]) -> None:
        self.hidden += len(lines)


def may_fold(text: str) -> bool:
    """Whether something to fold may begin in a text of many lines."""
    may_be_frame = "#" in text and "frame #" in text  # a single character is found much faster
    return may_be_frame or any(part in text for part in _BEGINS)


def plain(line: LogLine) -> str:
    """The text without torch's ``[rank3]:``."""
    return _RANK.sub("", line.text, count=1)
