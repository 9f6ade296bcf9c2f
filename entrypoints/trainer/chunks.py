"""Tensors out of a checkpoint's files. Nothing is unpickled: bytes become numbers, or are refused.

Each chunk is what ``torch.save`` writes for one tensor: a zip archive, not compressed, with the
numbers in ``data/0`` and, in ``data.pkl``, how they lie there.
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
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from trainer import plain_pickle
from trainer.contents import DTYPES, Chunk, Contents, Shape
from trainer.plain_pickle import PERSISTENT, Refused

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
_NAMES = frozenset(
    {
        *(("torch", name) for name in (*_STORAGES, *DTYPES)),
        ("torch.storage", "UntypedStorage"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("collections", "OrderedDict"),
    }
)
_ODD = (
    *(zipfile.BadZipFile, struct.error, EOFError, NotImplementedError, RuntimeError),
    *(ValueError, LookupError, ArithmeticError),
)
"""What zipfile raises when an archive is none, or has what ours never have."""
_LARGEST_READ = 2**20
"""Bytes that zipfile reads at once: an archive's list of entries takes some 600."""
_LARGEST_PICKLE = 2**16
"""Bytes of a ``data.pkl``, which takes some 200."""


class _Layout(NamedTuple):
    """Where a chunk's numbers lie: from `position` in the file, and how in what is read there."""

    position: int
    length: int
    offset: int
    strides: Shape


def open_plain(path: Path) -> BinaryIO:
    """A file, which must not be a link, a pipe or a device.

    Raises FileNotFoundError, and Refused for the others.
    """
    if path.is_symlink():
        raise Refused(f"{path.name} is a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Refused(f"{path.name} is no file")
    return os.fdopen(descriptor, "rb")


def check(folder: Path, chunks: Iterable[Chunk]) -> None:
    """Raise Refused where the bytes of a chunk are not what the table of contents says."""
    _each(folder, chunks, _layout)


def read(folder: Path, contents: Contents) -> dict[str, Tensor]:
    """Every tensor, whole."""
    state = {
        name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in contents.tensors.items()
    }

    def place(file: BinaryIO, chunk: Chunk) -> None:
        found = state[chunk.tensor]
        _narrow(found, chunk.offsets, chunk.sizes).copy_(_tensor(file, chunk))

    _each(folder, contents.chunks.values(), place)
    return state


class Reader(FileSystemReader):
    """Gives torch's loading the table of contents that was checked, and tensors by this module."""

    def __init__(self, folder: Path, contents: Contents) -> None:
        super().__init__(folder)
        self._folder, self._contents = folder, contents

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        return self._contents.metadata()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[Chunk, list[ReadItem]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise Refused("it holds an object, and only tensors are loaded")
            index = item.storage_index
            chunk = self._contents.chunks[index.fqn, tuple(index.offset or ())]
            wanted.setdefault(chunk, []).append(item)

        def fill(file: BinaryIO, chunk: Chunk) -> None:
            tensor = _tensor(file, chunk)
            for item in wanted[chunk]:
                target = planner.resolve_tensor(item).detach()
                target.copy_(_narrow(tensor, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)

        _each(self._folder, wanted, fill)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class Planner(DefaultLoadPlanner):
    """The usual plan; torch's own would unpickle what is stored as bytes, whatever it holds."""

    def load_bytes(self, *_item_and_bytes: Any) -> None:
        raise Refused("it holds an object, and only tensors are loaded")


def _each(folder: Path, chunks: Iterable[Chunk], action: Callable[[BinaryIO, Chunk], Any]) -> None:
    """Call `action` with each chunk and its file, one file after the other."""
    files: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        files.setdefault(chunk.file, []).append(chunk)
    for name, inside in files.items():
        with open_plain(folder / name) as file:
            for chunk in sorted(inside, key=lambda chunk: chunk.start):
                action(file, chunk)


def _narrow(tensor: Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(axis, offset, size)
    return tensor


def _tensor(file: BinaryIO, chunk: Chunk) -> Tensor:
    layout = _layout(file, chunk)
    content = bytearray(layout.length)
    file.seek(layout.position)
    if file.readinto(content) != layout.length:
        raise Refused(f"{chunk.file} has become shorter")
    numbers = torch.frombuffer(content, dtype=chunk.dtype)
    return numbers.as_strided(chunk.sizes, layout.strides, layout.offset)


def _layout(file: BinaryIO, chunk: Chunk) -> _Layout:
    try:
        with zipfile.ZipFile(_Part(file, chunk.start, chunk.length)) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            described = _entry(archive, names["data.pkl"], most=_LARGEST_PICKLE)
            if "byteorder" in names:
                _check_order(_entry(archive, names["byteorder"], most=16))
            key, count, offset, strides = _described(described, chunk)
            entry = archive.getinfo(names[f"data/{key}"])
            position = _position(file, chunk, entry)
    except Refused:
        raise
    except _ODD as error:
        raise Refused(f"the stored {chunk.tensor} is no tensor ({type(error).__name__})") from None
    last = offset + sum((n - 1) * step for n, step in zip(chunk.sizes, strides, strict=True))
    length = count * chunk.dtype.itemsize
    if last >= count or length != entry.file_size:
        raise Refused(f"the stored {chunk.tensor} is of another size")
    return _Layout(position, length, offset, strides)


def _entry(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most:
        raise Refused("an archive that torch did not write")
    return archive.read(entry)


def _check_order(found: bytes) -> None:
    if found.decode("ascii", "replace") != sys.byteorder:
        raise Refused("it was written on a machine with another order of bytes")


def _position(file: BinaryIO, chunk: Chunk, entry: zipfile.ZipInfo) -> int:
    """First byte of an entry's content in the file."""
    file.seek(chunk.start + entry.header_offset)
    header = struct.unpack("<4s5H3I2H", file.read(30))
    begin = entry.header_offset + 30 + header[-2] + header[-1]
    stored = entry.compress_type == zipfile.ZIP_STORED and header[0] == b"PK\3\4"
    if not stored or begin + entry.file_size > chunk.length:
        raise Refused("an archive that torch did not write")
    return chunk.start + begin


def _described(data: bytes, chunk: Chunk) -> tuple[str, int, int, Shape]:
    """Name of the storage, its numbers, the first of them that counts, and the strides."""
    made = plain_pickle.load(data, _NAMES)
    with suppress(TypeError, ValueError, AttributeError, LookupError):
        storage, offset, sizes, strides, _requires_gradient, _hooks, *rest = made.arguments
        word, kind, key, _device, count = storage.arguments[0]
        dtype = _STORAGES.get(kind.name.removeprefix("torch."))
        if made.name == _UNTYPED:
            dtype = DTYPES.get(rest.pop(0).name.removeprefix("torch."))
            count //= chunk.dtype.itemsize
        names = (made.name in (_TYPED, _UNTYPED), storage.name, word)
        known = names == (True, PERSISTENT, "storage") and type(key) is str and not any(rest)
        alike = dtype == chunk.dtype and sizes == chunk.sizes and len(strides) == len(sizes)
        if known and alike and _plain(offset, count, *strides):
            return key, count, offset, strides
    raise Refused(f"the stored {chunk.tensor} is not the tensor that is announced")


def _plain(*numbers: Any) -> bool:
    return all(type(number) is int and 0 <= number < 2**62 for number in numbers)


class _Part(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, (0, self._at, self._length)[whence] + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        wanted = left if size < 0 else min(size, left)
        if wanted > _LARGEST_READ:
            raise Refused("an archive that torch did not write")
        self._file.seek(self._start + self._at)
        found = self._file.read(wanted)
        self._at += len(found)
        return found
