"""Whether all nodes of the job have come to a point, found out with few file operations.

A folder that all nodes share is asked more slowly than one node can ask: a thousand nodes that each
read what the others wrote are a million reads. Here each node leaves one empty file. How often a
node counts the files falls with the number of nodes, so that together they count `_COUNTS` times a
second. Whoever counts all of them leaves ``all``, for which each node looks less and less often.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from deploykit_node import records
from deploykit_node.cluster import Cluster, Environ

_ALL = "all"
_COUNTS = 25.0
"""How often the files are counted in a second, by all nodes together."""
_SHORTEST, _LONGEST = 0.2, 2.0
"""Seconds between two looks of a node."""
_GROWTH = 2.0
_UNHURRIED = 1000.0
"""Nodes of which each looks only after a second."""
_SPREAD = 0.5
"""Share by which a pause is changed at random, so that the nodes do not look at the same time."""


class Pause:
    """When to look again: after `shortest` to `longest` seconds, each pause twice the last.

    The first look comes at a random time within `delay` seconds of the first question.
    """

    def __init__(
        self, shortest: float = _SHORTEST, longest: float = _LONGEST, delay: float = 0.0
    ) -> None:
        self._next, self._longest, self._delay = shortest, longest, delay
        self._at: float | None = None

    @classmethod
    def of(cls, count: int) -> Pause:
        """The pauses of one of `count` nodes: the longer, the more nodes there are."""
        first = min(1.0, count / _UNHURRIED)
        if first <= _SHORTEST:
            return cls()
        return cls(3 * first, max(_LONGEST, 3 * count / _UNHURRIED), 5 * first)

    def over(self) -> bool:
        """Whether to look now; if so, the next pause begins."""
        if self._at is None:
            self._at = time.monotonic() + random.uniform(0, self._delay)  # noqa: S311 - as below
        if time.monotonic() < self._at:
            return False
        self._at = time.monotonic() + self.seconds()
        return True

    def seconds(self) -> float:
        """The length of the next pause."""
        pause, self._next = self._next, min(self._next * _GROWTH, self._longest)
        return pause * random.uniform(1 - _SPREAD, 1 + _SPREAD)  # noqa: S311 - no secret


def is_written(path: Path) -> bool:
    """Whether a file is there and not empty."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


class Gathering:
    """The nodes that have come to one point, each a file in `folder`. `count` is all nodes.

    Who counts all of them writes `flag`; one given by the caller is written by the caller.
    """

    def __init__(self, folder: Path, node: int, count: int, flag: Path | None = None) -> None:
        self._folder, self._node, self._count = folder, node, count
        self._flag, self._writes_flag = flag or folder / _ALL, flag is None
        self._look, self._arrived = Pause.of(count), False
        self.flagged = False
        """Whether the flag was seen, so that another node has gone on already."""
        pause = count / _COUNTS
        delay = pause if pause > _SHORTEST else 0.0
        self._counting = Pause(max(pause, _SHORTEST), max(pause, _SHORTEST), delay)

    def arrive(self) -> None:
        """Note that this node has come to the point."""
        if not self._arrived and self._count > 1:
            self._touch(str(self._node))
        self._arrived = True

    def complete(self) -> bool:
        """Whether all nodes have. Call it as often as is convenient."""
        if self._count == 1:
            return self._arrived
        self.flagged = self.flagged or (self._look.over() and is_written(self._flag))
        if self.flagged:
            return True
        if self._counting.over() and self._all_have_come():
            if self._writes_flag:
                records.write_text(self._flag, "\n")
            return True
        return False

    def _all_have_come(self) -> bool:
        try:
            return len(os.listdir(self._folder)) >= self._count  # noqa: PTH208 - names are enough
        except FileNotFoundError:
            return False

    def _touch(self, name: str) -> None:
        path = str(self._folder / name)
        try:
            os.close(records.private(path, os.O_CREAT | os.O_WRONLY))
        except FileNotFoundError:
            records.make_folder(self._folder)
            os.close(records.private(path, os.O_CREAT | os.O_WRONLY))


def gathering(env: Environ, name: str, here: Cluster, flag: Path | None = None) -> Gathering | None:
    """The nodes that have come to the point `name` of this attempt; None without a run folder."""
    folder, group = records.folder(env), records.generation(env)
    point = f"gathering-{name}{group or ''}-{records.attempt(env)}"
    return Gathering(folder / point, here.node, len(here.hosts), flag) if folder else None
