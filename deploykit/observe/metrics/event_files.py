"""TensorBoard's event files: the scalars in them, read without TensorFlow and TensorBoard.

The numbers of fields are those of event.proto, summary.proto and tensor.proto in
https://github.com/tensorflow/tensorboard/tree/master/tensorboard/compat/proto
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from io import FileIO
from typing import NamedTuple

from deploykit.observe.metrics import tfrecord, wire
from deploykit.observe.metrics.points import LONGEST_NAME, Point, count

NAME = "events.out.tfevents."
"""In the name of every event file."""
OWN = ".deploykit"
"""Ends the name of those that deploykit wrote for TensorBoard, which are not read again."""
_WALL_TIME, _STEP, _SUMMARY = 1, 2, 5
_VALUE = 1
"""Of a summary: repeated."""
_TAG, _SIMPLE_VALUE, _TENSOR = 1, 2, 8
_DTYPE, _SHAPE, _CONTENT = 1, 2, 4
_LETTERS = {1: "f", 2: "d", 3: "i", 9: "q"}
"""Type of a tensor: the letter of its numbers in `struct`."""
_OWN_FIELDS = {1: 5, 2: 6}
"""Type of a tensor: the field of its numbers where they are not in `_CONTENT`; those of integers
are varints, which no writer of scalars uses."""


class Event(NamedTuple):
    """One record, and its scalars by tag."""

    step: int
    time: float | None
    scalars: tuple[tuple[str, float], ...]


class EventFile:
    """One event file, read as it grows."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self.problem = ""
        """Why the rest of the file is not read."""

    def read(self, file: FileIO) -> Iterator[Point]:
        """The points that were written since the last call."""
        if self.problem:
            return
        file.seek(self._at)
        try:
            for record in tfrecord.records(file, os.fstat(file.fileno()).st_size):
                yield from self._points(event(record))
        except tfrecord.Damaged as error:
            self.problem = f"{self._source}: {error}"
        self._at = file.tell()

    def _points(self, one: Event) -> Iterator[Point]:
        for tag, value in one.scalars:
            name = tag[:LONGEST_NAME]
            yield Point(name, value, count(one.step), time=one.time, source=self._source)


def event(data: bytes) -> Event:
    """A record as an event; what is no valid message of scalars has none."""
    step, time = 0, None
    scalars: list[tuple[str, float]] = []
    try:
        for number, value in wire.fields(data):
            if number == _WALL_TIME:
                time = next((one for one in wire.floats(value, "d") if math.isfinite(one)), None)
            elif number == _STEP:
                step = wire.signed(value) or 0
            elif number == _SUMMARY and isinstance(value, bytes):
                scalars += _scalars(value)
    except wire.Malformed:
        pass
    return Event(step, time, tuple(scalars))


def _scalars(summary: bytes) -> Iterator[tuple[str, float]]:
    """Tag and value of each scalar in a summary."""
    for number, value in wire.fields(summary):
        if number == _VALUE and isinstance(value, bytes):
            tag, scalar = _scalar(value)
            if tag and scalar is not None:
                yield tag, scalar


def _scalar(message: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, value in wire.fields(message):
        if number == _TAG:
            tag = wire.text(value)
        elif number == _SIMPLE_VALUE:
            scalar = next(iter(wire.floats(value, "f")), None)
        elif number == _TENSOR and isinstance(value, bytes):
            scalar = _tensor(value)
    return tag, scalar


def _tensor(message: bytes) -> float | None:
    """The number of a tensor without dimensions; None for any other tensor."""
    fields = dict(wire.fields(message))
    kind = fields.get(_DTYPE)
    letter = _LETTERS.get(kind) if isinstance(kind, int) else None
    if letter is None or fields.get(_SHAPE):
        return None
    own = _OWN_FIELDS.get(kind, 0) if isinstance(kind, int) else 0
    content = fields.get(_CONTENT) or fields.get(own, b"")
    numbers = wire.floats(content, letter)
    return float(numbers[0]) if len(numbers) == 1 else None
