"""TensorBoard's event files: scalars read and written without TensorFlow and TensorBoard."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator
from io import FileIO
from typing import NamedTuple

from deploykit.observe.metrics.points import LONGEST_NAME, Point, Value, count

_Wire = int | bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
"""Bytes of a number of 64 bits."""


class Malformed(ValueError):
    """Bytes that are no message."""


def _fields(data: bytes) -> Iterator[tuple[int, _Wire]]:
    """The fields of a message in their order: number, and value.

    A varint is an unsigned int; all other values are bytes: 4 or 8 of a fixed number, or those of a
    text, a message or packed numbers. Raises Malformed, after the fields before the fault.
    """
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind, number = key & 7, key >> 3
        value: _Wire
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        elif kind in {_FIXED64, _FIXED32, _BYTES}:
            size = 8 if kind == _FIXED64 else 4
            if kind == _BYTES:
                size, at = _read_varint(data, at)
            value = data[at : at + size]
            at += size
            if at > len(data):
                raise Malformed("a field is longer than its message")
        else:
            raise Malformed(f"a field is of the unknown kind {kind}")
        yield number, value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of up to 64 bits, 7 in a byte, and the position after it."""
    value = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:  # noqa: PLR2004 - the last byte has no high bit
            return value & 0xFFFFFFFFFFFFFFFF, at + index + 1
    raise Malformed("a number does not end")


def _signed(value: _Wire) -> int | None:
    """A varint as a signed integer of 64 bits; None for another kind."""
    if not isinstance(value, int):
        return None
    return value - (1 << 64) if value >> 63 else value


def _as_text(value: _Wire) -> str:
    """Bytes as text; empty for another kind."""
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _floats(value: _Wire, letter: str) -> tuple[float, ...]:
    """One or several packed numbers, by their letter in `struct`; empty for another kind."""
    size = struct.calcsize(f"<{letter}")
    if not isinstance(value, bytes) or len(value) % size:
        return ()
    return struct.unpack(f"<{len(value) // size}{letter}", value)


MAX_RECORD_BYTES = 64 * 1024
"""Bytes of a record that is read; longer ones hold pictures and graphs, and are skipped."""
_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_POLYNOMIAL = 0x82F63B78
"""CRC-32C, reversed (RFC 3720, appendix B.4)."""
_MASK_DELTA = 0xA282EAD8
"""What TensorFlow adds to a rotated checksum (``crc32c::Mask``)."""


class Damaged(ValueError):
    """A record whose checksum is wrong: the rest of the file cannot be read."""


def read_records(file: FileIO, size: int) -> Iterator[bytes]:
    """The records from the file's position to `size` bytes, without those over `MAX_RECORD_BYTES`.

    After each the position is at the next one. An incomplete record at the end is left for a later
    call, since its file may be growing. Raises Damaged.
    """
    at = file.tell()
    while at + _HEADER.size + _FOOTER.size <= size:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            break
        length, checksum = _HEADER.unpack(header)
        if _masked(header[:8]) != checksum:
            raise Damaged(f"the record at byte {at} is damaged")
        after = at + _HEADER.size + length + _FOOTER.size
        if after > size:
            break
        data = _record_data(file, length, at)
        file.seek(after)
        at = after
        if data is not None:
            yield data
    file.seek(at)


def _record_data(file: FileIO, length: int, at: int) -> bytes | None:
    """The data of a record; None where it is too long to be a number."""
    if length > MAX_RECORD_BYTES:
        return None
    data, footer = file.read(length), file.read(_FOOTER.size)
    if len(footer) < _FOOTER.size or _masked(data) != _FOOTER.unpack(footer)[0]:
        raise Damaged(f"the record at byte {at} is damaged")
    return data


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


FILE_NAME = "events.out.tfevents."
"""In the name of every event file."""
OWN_ENDING = ".deploykit"
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
            for record in read_records(file, os.fstat(file.fileno()).st_size):
                yield from self._points(decode_event(record))
        except Damaged as error:
            self.problem = f"{self._source}: {error}"
        self._at = file.tell()

    def _points(self, one: Event) -> Iterator[Point]:
        for tag, value in one.scalars:
            name = tag[:LONGEST_NAME]
            yield Point(name, value, count(one.step), time=one.time, source=self._source)


def decode_event(data: bytes) -> Event:
    """A record as an event; what is no valid message of scalars has none."""
    step, time = 0, None
    scalars: list[tuple[str, float]] = []
    try:
        for number, value in _fields(data):
            if number == _WALL_TIME:
                time = next((one for one in _floats(value, "d") if math.isfinite(one)), None)
            elif number == _STEP:
                step = _signed(value) or 0
            elif number == _SUMMARY and isinstance(value, bytes):
                scalars += _scalars(value)
    except Malformed:
        pass
    return Event(step, time, tuple(scalars))


def _scalars(summary: bytes) -> Iterator[tuple[str, float]]:
    """Tag and value of each scalar in a summary."""
    for number, value in _fields(summary):
        if number == _VALUE and isinstance(value, bytes):
            tag, scalar = _scalar(value)
            if tag and scalar is not None:
                yield tag, scalar


def _scalar(message: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, value in _fields(message):
        if number == _TAG:
            tag = _as_text(value)
        elif number == _SIMPLE_VALUE:
            scalar = next(iter(_floats(value, "f")), None)
        elif number == _TENSOR and isinstance(value, bytes):
            scalar = _tensor(value)
    return tag, scalar


def _tensor(message: bytes) -> float | None:
    """The number of a tensor without dimensions; None for any other tensor."""
    fields = dict(_fields(message))
    kind = fields.get(_DTYPE)
    letter = _LETTERS.get(kind) if isinstance(kind, int) else None
    if letter is None or fields.get(_SHAPE):
        return None
    own = _OWN_FIELDS.get(kind, 0) if isinstance(kind, int) else 0
    content = fields.get(_CONTENT) or fields.get(own, b"")
    numbers = _floats(content, letter)
    return float(numbers[0]) if len(numbers) == 1 else None


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
