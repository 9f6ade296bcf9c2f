"""TensorBoard's event files: scalars written without TensorFlow and TensorBoard.

The format is that of `deploykit.observe.metrics.event_files`, which reads it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

from deploykit.observe.metrics import event_files, tfrecord
from deploykit.observe.trackers.selection import Value

_VERSION = b"brain.Event:2"
"""Of the format; the first record of a file says it."""
_GREATEST = 3.4028234663852886e38
"""The greatest number of 32 bits, in which scalars are kept."""


def name(started: float, number: int) -> str:
    """The name of the file `number` of a run; TensorBoard reads them in the order of names."""
    return f"{event_files.NAME}{int(started):010d}.{number:04d}{event_files.OWN}"


def heading(time: float) -> bytes:
    """The first record of a file."""
    return _record(struct.pack("<Bd", 1 << 3 | 1, time) + _text(3, _VERSION))


def records(values: Iterable[Value], time: float) -> bytes:
    """A record for each value; `time` is that of values without one."""
    return b"".join(_record(_event(one, time)) for one in values)


def _event(one: Value, time: float) -> bytes:
    number = one.value
    if math.isfinite(number) and abs(number) > _GREATEST:
        number = math.copysign(math.inf, number)
    scalar = _text(1, one.name.encode()) + struct.pack("<Bf", 2 << 3 | 5, number)
    when = struct.pack("<Bd", 1 << 3 | 1, time if one.time is None else one.time)
    return when + b"\x10" + _varint(one.step) + _text(5, _text(1, scalar))


def _text(field: int, content: bytes) -> bytes:
    """A field of bytes: a text, or a message."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """A number of at least 0: 7 bits in a byte, the least significant first."""
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - the greatest of 7 bits
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    checks = (struct.pack("<I", tfrecord.masked(one)) for one in (length, data))
    return length + next(checks) + data + next(checks)
