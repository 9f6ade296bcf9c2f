"""Metrics as JSON lines: one object for each logged step, as deploykit's own trainer writes them.

Names of the step and the epoch are those that several libraries use.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from io import FileIO

from deploykit.job.decode import from_json
from deploykit.observe.metrics.points import LONGEST_NAME, STEPS, Point, count, real

NAME = "metrics.jsonl"
TIMES = ("time", "timestamp", "_timestamp", "wall_time")
_NOT_METRICS = {*STEPS, *TIMES, "epoch"}
_LONGEST = 1 << 20
"""Bytes of a line; longer ones are skipped."""
_MOST = 1000
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
        while piece := file.read(_LONGEST):
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                yield from points(line, self._source)
            if len(self._rest) > _LONGEST:
                self._rest = b""
        self._at = file.tell()


def points(line: bytes | str, source: str) -> Iterator[Point]:
    """The numbers of a line that is a JSON object, text among them; none of any other line."""
    try:
        data = from_json(line)
    except ValueError:
        return
    if not isinstance(data, dict):
        return
    step = next((count(real(data.get(name))) for name in STEPS if name in data), None)
    time = next((_finite(data.get(name)) for name in TIMES if name in data), None)
    epoch = _finite(data.get("epoch"))
    for name, value in list(data.items())[:_MOST]:
        number = real(value)
        if number is not None and name not in _NOT_METRICS:
            yield Point(name[:LONGEST_NAME], number, step, epoch, time, source=source)


def _finite(value: object) -> float | None:
    number = real(value)
    return number if number is not None and math.isfinite(number) else None
