"""TensorBoard's event files: scalars read and written without TensorFlow and TensorBoard.

A file is a row of records with checksums (TFRecord), each of which is an `Event` of protocol
buffers: https://github.com/tensorflow/tensorboard/tree/master/tensorboard/compat/proto
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator
from io import FileIO
from typing import NamedTuple

from deploykit.observe.metrics.points import LONGEST_NAME, Point, Value, count

FILE_NAME = "events.out.tfevents."
"""In the name of every event file."""
OWN_ENDING = ".deploykit"
"""Ends the name of those that deploykit wrote for TensorBoard, which are not read again."""
MAX_RECORD_BYTES = 64 * 1024
"""Bytes of a record that is read; longer ones hold pictures and graphs, and are skipped."""
_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
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
_VARINT, _BYTES = 0, 2
_SIZES = {1: 8, 5: 4}
"""Kinds of fields with a fixed number: its bytes."""
_MAX_VARINT_BYTES = 10
_POLYNOMIAL = 0x82F63B78
"""CRC-32C, reversed (RFC 3720, appendix B.4)."""
_MASK_DELTA = 0xA282EAD8
"""What TensorFlow adds to a rotated checksum (``crc32c::Mask``)."""


class Malformed(ValueError):
    """Bytes that are no message."""


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
        """The points since the last call, up to an incomplete or damaged record."""
        size = os.fstat(file.fileno()).st_size
        while not self.problem:
            file.seek(self._at)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return
            length, checksum = _HEADER.unpack(header)
            is_good, data = _masked(header[:8]) == checksum, b""
            after = self._at + _HEADER.size + length + _FOOTER.size
            if is_good and after > size:
                return
            if is_good and length <= MAX_RECORD_BYTES:
                data = file.read(length)
                is_good = file.read(_FOOTER.size) == _FOOTER.pack(_masked(data))
            if not is_good:
                self.problem = f"{self._source}: the record at byte {self._at} is corrupt"
                return
            self._at = after
            event = decode_event(data)
            for tag, value in event.scalars:
                step = count(event.step)
                yield Point(tag[:LONGEST_NAME], value, step, time=event.time, source=self._source)


def decode_event(data: bytes) -> Event:
    """A record as an event; what is no valid message of scalars has none."""
    step, time = 0, None
    scalars: list[tuple[str, float]] = []
    try:
        for number, value in _fields(data):
            if number == _WALL_TIME:
                time = _number(value, "d")
            elif number == _STEP and isinstance(value, int):
                step = value - (1 << 64) if value >> 63 else value
            elif number == _SUMMARY and isinstance(value, bytes):
                values = (one for field, one in _fields(value) if field == _VALUE)
                scalars += [scalar for one in values if (scalar := _scalar(one))]
    except Malformed:
        pass
    return Event(step, time if time is not None and math.isfinite(time) else None, tuple(scalars))


def _scalar(message: int | bytes) -> tuple[str, float] | None:
    """Tag and value of a value of a summary, if it has both."""
    fields = dict(_fields(message)) if isinstance(message, bytes) else {}
    tag, tensor = fields.get(_TAG), fields.get(_TENSOR)
    scalar = _number(fields.get(_SIMPLE_VALUE), "f")
    if isinstance(tensor, bytes):
        scalar = _tensor(dict(_fields(tensor)))
    return (
        (tag.decode(errors="replace"), scalar)
        if isinstance(tag, bytes) and scalar is not None
        else None
    )


def _tensor(fields: dict[int, int | bytes]) -> float | None:
    """The number of a tensor without dimensions; None for any other tensor."""
    kind = fields.get(_DTYPE)
    if not isinstance(kind, int) or kind not in _LETTERS or fields.get(_SHAPE):
        return None
    content = fields.get(_CONTENT) or fields.get(_OWN_FIELDS.get(kind, 0))
    return _number(content, _LETTERS[kind])


def _number(value: int | bytes | None, letter: str) -> float | None:
    """A single number by its letter in `struct`; None for anything else."""
    if not isinstance(value, bytes) or len(value) != struct.calcsize(f"<{letter}"):
        return None
    return float(struct.unpack(f"<{letter}", value)[0])


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in their order: number, and value.

    A varint is an unsigned int; all other values are bytes: 4 or 8 of a fixed number, or those of a
    text, a message or packed numbers. Raises Malformed, after the fields before the fault.
    """
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind, number = key & 7, key >> 3
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(data, at)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise Malformed(f"a field has the unknown wire type {kind}")
        if at + size > len(data):
            raise Malformed("a field extends past the end of its message")
        yield number, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of up to 64 bits, 7 in a byte, and the position after it."""
    value = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:  # noqa: PLR2004 - the last byte has no high bit
            return value & 0xFFFFFFFFFFFFFFFF, at + index + 1
    raise Malformed("a number is truncated")


def _crc_table() -> tuple[int, ...]:
    entries = []
    for value in range(256):
        crc = value
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        entries.append(crc)
    return tuple(entries)


_CRC_TABLE = _crc_table()


def _masked(data: bytes) -> int:
    """The checksum of `data` as it is written."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


_VERSION = b"brain.Event:2"
"""Of the format; the first record of a file says it."""
_GREATEST = 3.4028234663852886e38
"""The greatest number of 32 bits, in which scalars are kept."""


def file_name(started: float, number: int) -> str:
    """The name of the file `number` of a run; TensorBoard reads them in the order of names."""
    return f"{FILE_NAME}{int(started):010d}.{number:04d}{OWN_ENDING}"


def heading(time: float) -> bytes:
    """The first record of a file."""
    return _framed(struct.pack("<Bd", 1 << 3 | 1, time) + _bytes_field(3, _VERSION))


def records(values: Iterable[Value], time: float) -> bytes:
    """A record for each value; `time` is that of values without one."""
    return b"".join(_framed(_encoded(one, time)) for one in values)


def _encoded(one: Value, time: float) -> bytes:
    number = one.value
    if math.isfinite(number) and abs(number) > _GREATEST:
        number = math.copysign(math.inf, number)
    scalar = _bytes_field(1, one.name.encode()) + struct.pack("<Bf", 2 << 3 | 5, number)
    when = struct.pack("<Bd", 1 << 3 | 1, time if one.time is None else one.time)
    return when + b"\x10" + _varint(one.step) + _bytes_field(5, _bytes_field(1, scalar))


def _bytes_field(field: int, content: bytes) -> bytes:
    """A field of bytes: a text, or a message."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """A number of at least 0: 7 bits in a byte, the least significant first."""
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - the greatest of 7 bits
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    checks = (struct.pack("<I", _masked(one)) for one in (length, data))
    return length + next(checks) + data + next(checks)
