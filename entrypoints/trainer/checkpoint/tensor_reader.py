"""Reads tensors from untrusted checkpoint files without unpickling them.

Each chunk is what ``torch.save`` writes for one tensor: an uncompressed zip archive with the
elements in ``data/0`` and a description of their layout in ``data.pkl``.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint import safe_pickle
from trainer.checkpoint.metadata import DTYPES, CheckpointMetadata, Chunk, Shape
from trainer.checkpoint.safe_pickle import PERSISTENT_ID, InvalidFile

_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_TYPED, _UNTYPED = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_ALLOWED_NAMES = frozenset(
    {
        *(("torch", name) for name in (*_STORAGES, *DTYPES)),
        ("torch.storage", "UntypedStorage"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("collections", "OrderedDict"),
    }
)
_ARCHIVE_ERRORS = (
    *(zipfile.BadZipFile, struct.error, EOFError, NotImplementedError, RuntimeError),
    *(ValueError, LookupError, ArithmeticError),
)
"""What zipfile raises for invalid archives and for features that torch does not use."""
_NOT_BY_TORCH = "an archive was not written by torch"
_MAX_READ = 2**20
"""Bytes that zipfile may read at once; the directory of an archive takes about 600."""
_MAX_PICKLE = 2**16
"""Bytes of a ``data.pkl``, which takes about 200."""


class _Layout(NamedTuple):
    """How the elements of a chunk are stored."""

    position: int
    """First byte of the storage in the file."""
    length: int
    """Bytes of the storage."""
    offset: int
    """First element in the storage."""
    strides: Shape


def open_regular_file(path: Path) -> io.BufferedReader:
    """Open a file that must not be a symbolic link, a pipe or a device.

    Raises FileNotFoundError, and InvalidFile for other kinds of files.
    """
    if path.is_symlink():
        raise InvalidFile(f"{path.name} is a symbolic link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidFile(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def validate(folder: Path, chunks: Iterable[Chunk]) -> None:
    """Raise InvalidFile if a stored chunk does not match the metadata."""
    for_each(folder, chunks, _layout)


def read_tensors(folder: Path, metadata: CheckpointMetadata) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, unsharded, into CPU memory."""
    state = {
        name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in metadata.tensors.items()
    }

    def copy(file: io.BufferedReader, chunk: Chunk) -> None:
        target = narrow(state[chunk.tensor], chunk.offsets, chunk.sizes)
        target.copy_(read(file, chunk))

    for_each(folder, metadata.chunks.values(), copy)
    return state


def for_each(
    folder: Path, chunks: Iterable[Chunk], action: Callable[[io.BufferedReader, Chunk], Any]
) -> None:
    """Call `action` with each chunk and its open file, one file at a time."""
    by_file: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_file.setdefault(chunk.file, []).append(chunk)
    for name, stored in by_file.items():
        with open_regular_file(folder / name) as file:
            for chunk in sorted(stored, key=lambda chunk: chunk.start):
                action(file, chunk)


def narrow(tensor: Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """The part of `tensor` at these offsets."""
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(axis, offset, size)
    return tensor


def read(file: io.BufferedReader, chunk: Chunk) -> Tensor:
    """The tensor of a chunk, of shape `chunk.sizes`."""
    layout = _layout(file, chunk)
    content = bytearray(layout.length)
    file.seek(layout.position)
    if file.readinto(content) != layout.length:
        raise InvalidFile(f"{chunk.file} was truncated while it was read")
    elements = torch.frombuffer(content, dtype=chunk.dtype)
    return elements.as_strided(chunk.sizes, layout.strides, layout.offset)


def _layout(file: io.BufferedReader, chunk: Chunk) -> _Layout:
    """Parse the archive of a chunk. Raises InvalidFile if it does not match the metadata."""
    try:
        with zipfile.ZipFile(_FileSlice(file, chunk.start, chunk.length)) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            description = _entry(archive, names["data.pkl"], _MAX_PICKLE)
            if "byteorder" in names:
                _check_byte_order(_entry(archive, names["byteorder"], 16))
            key, count, offset, strides = _describe(description, chunk)
            entry = archive.getinfo(names[f"data/{key}"])
            position = _position(file, chunk, entry)
    except InvalidFile:
        raise
    except _ARCHIVE_ERRORS as error:
        raise InvalidFile(
            f"cannot read the tensor {chunk.tensor} ({type(error).__name__})"
        ) from None
    last = offset + sum((n - 1) * stride for n, stride in zip(chunk.sizes, strides, strict=True))
    length = count * chunk.dtype.itemsize
    if last >= count or length != entry.file_size:
        raise InvalidFile(f"the stored size of {chunk.tensor} does not match the metadata")
    return _Layout(position, length, offset, strides)


def _entry(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > max_bytes:
        raise InvalidFile(_NOT_BY_TORCH)
    return archive.read(entry)


def _check_byte_order(order: bytes) -> None:
    if order.decode("ascii", "replace") != sys.byteorder:
        raise InvalidFile("it was written on a machine with another byte order")


def _position(file: io.BufferedReader, chunk: Chunk, entry: zipfile.ZipInfo) -> int:
    """Position in the file of the first byte of an archive entry's content."""
    file.seek(chunk.start + entry.header_offset)
    header = struct.unpack("<4s5H3I2H", file.read(30))
    name_bytes, extra_bytes = header[-2:]
    begin = entry.header_offset + 30 + name_bytes + extra_bytes
    is_stored = entry.compress_type == zipfile.ZIP_STORED and header[0] == b"PK\3\4"
    if not is_stored or begin + entry.file_size > chunk.length:
        raise InvalidFile(_NOT_BY_TORCH)
    position: int = chunk.start + begin
    return position


def _describe(data: bytes, chunk: Chunk) -> tuple[str, int, int, Shape]:
    """The storage's key and element count, and the tensor's first element and strides in it."""
    tensor = safe_pickle.load(data, _ALLOWED_NAMES)
    with suppress(TypeError, ValueError, AttributeError, LookupError):
        storage, offset, sizes, strides, _requires_gradient, _hooks, *rest = tensor.arguments
        word, kind, key, _device, count = storage.arguments[0]
        dtype = _STORAGES.get(kind.name.removeprefix("torch."))
        if tensor.name == _UNTYPED:
            dtype = DTYPES.get(rest.pop(0).name.removeprefix("torch."))
            count //= chunk.dtype.itemsize
        names = (tensor.name in (_TYPED, _UNTYPED), storage.name, word)
        known = names == (True, PERSISTENT_ID, "storage") and type(key) is str and not any(rest)
        matches = dtype == chunk.dtype and sizes == chunk.sizes and len(strides) == len(sizes)
        if known and matches and _are_sizes(offset, count, *strides):
            return key, count, offset, strides
    raise InvalidFile(f"the stored tensor {chunk.tensor} does not match the metadata")


def _are_sizes(*numbers: Any) -> bool:
    return all(type(number) is int and 0 <= number < 2**62 for number in numbers)


class _FileSlice(io.RawIOBase):
    """A byte range of a file as a file of its own, with a limit on each read."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, (0, self._position, self._length)[whence] + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        remaining = max(0, self._length - self._position)
        count = remaining if size < 0 else min(size, remaining)
        if count > _MAX_READ:
            raise InvalidFile(_NOT_BY_TORCH)
        self._file.seek(self._start + self._position)
        data = self._file.read(count)
        self._position += len(data)
        return data
