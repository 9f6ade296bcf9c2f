"""Records of TensorFlow's container format, in which TensorBoard's event files are written.

Each is a length of 8 bytes, its checksum, the data, and their checksum; numbers are little-endian.
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from io import FileIO

LONGEST = 64 * 1024
"""Bytes of a record that is read; longer ones hold pictures and graphs, and are skipped."""
_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_POLYNOMIAL = 0x82F63B78
"""CRC-32C, reversed (RFC 3720, appendix B.4)."""
_MASK_DELTA = 0xA282EAD8
"""What TensorFlow adds to a rotated checksum (``crc32c::Mask``)."""


class Damaged(ValueError):
    """A record whose checksum is wrong: the rest of the file cannot be read."""


def records(file: FileIO, size: int) -> Iterator[bytes]:
    """The records from the file's position to `size` bytes, without those over `LONGEST`.

    After each the position is at the next one. An incomplete record at the end is left for a later
    call, since its file may be growing. Raises Damaged.
    """
    at = file.tell()
    while at + _HEADER.size + _FOOTER.size <= size:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            break
        length, checksum = _HEADER.unpack(header)
        if masked(header[:8]) != checksum:
            raise Damaged(f"the record at byte {at} is damaged")
        after = at + _HEADER.size + length + _FOOTER.size
        if after > size:
            break
        data = _data(file, length, at)
        file.seek(after)
        at = after
        if data is not None:
            yield data
    file.seek(at)


def _data(file: FileIO, length: int, at: int) -> bytes | None:
    """The data of a record; None where it is too long to be a number."""
    if length > LONGEST:
        return None
    data, footer = file.read(length), file.read(_FOOTER.size)
    if len(footer) < _FOOTER.size or masked(data) != _FOOTER.unpack(footer)[0]:
        raise Damaged(f"the record at byte {at} is damaged")
    return data


def _table() -> tuple[int, ...]:
    entries = []
    for value in range(256):
        crc = value
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        entries.append(crc)
    return tuple(entries)


_TABLE = _table()


def masked(data: bytes) -> int:
    """The checksum of `data` as it is written."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF
