"""Messages in the wire format of Protocol Buffers, without their schema.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Value = int | bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10
"""Bytes of a number of 64 bits."""


class Malformed(ValueError):
    """Bytes that are no message."""


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message in their order: number, and value.

    A varint is an unsigned int; all other values are bytes: 4 or 8 of a fixed number, or those of a
    text, a message or packed numbers. Raises Malformed, after the fields before the fault.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind, number = key & 7, key >> 3
        value: Value
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind in {_FIXED64, _FIXED32, _BYTES}:
            size = 8 if kind == _FIXED64 else 4
            if kind == _BYTES:
                size, at = _varint(data, at)
            value = data[at : at + size]
            at += size
            if at > len(data):
                raise Malformed("a field is longer than its message")
        else:
            raise Malformed(f"a field is of the unknown kind {kind}")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of up to 64 bits, 7 in a byte, and the position after it."""
    value = 0
    for index, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:  # noqa: PLR2004 - the last byte has no high bit
            return value & 0xFFFFFFFFFFFFFFFF, at + index + 1
    raise Malformed("a number does not end")


def signed(value: Value) -> int | None:
    """A varint as a signed integer of 64 bits; None for another kind."""
    if not isinstance(value, int):
        return None
    return value - (1 << 64) if value >> 63 else value


def text(value: Value) -> str:
    """Bytes as text; empty for another kind."""
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def floats(value: Value, letter: str) -> tuple[float, ...]:
    """One or several packed numbers, by their letter in `struct`; empty for another kind."""
    size = struct.calcsize(f"<{letter}")
    if not isinstance(value, bytes) or len(value) % size:
        return ()
    return struct.unpack(f"<{len(value) // size}{letter}", value)
