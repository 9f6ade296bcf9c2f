"""What a checkpoint says that it holds: the file ``.metadata`` of torch.distributed.checkpoint.

It may come from anybody, so nothing in it is believed: each tensor must be made of chunks that lie
inside it, fill it, and are backed by bytes that no other chunk claims, in a file of the checkpoint.
What a reader allocates is therefore never more than what is on the disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer import plain_pickle
from trainer.plain_pickle import Named, Refused

LARGEST = 64 * 2**20
"""Bytes of a ``.metadata``; a chunk takes some 200."""
LONGEST = 1000
"""Characters of a tensor's name."""
MOST_AXES = 64
"""Torch's own limit."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    )
}
_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
    *("MetadataIndex", "StorageMeta", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
NAMES = frozenset(
    {
        *((_METADATA, name) for name in _CLASSES),
        *(("torch", name) for name in DTYPES),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
    }
)
"""Every module and name in a ``.metadata``, by torch 2.6 to 2.13."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and where its bytes are."""

    tensor: str
    dtype: torch.dtype
    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Contents:
    """Tensors by name, with type and shape, and the chunks that they are made of."""

    tensors: dict[str, tuple[torch.dtype, Shape]]
    chunks: dict[tuple[str, Shape], Chunk]
    """By tensor and offsets."""

    def metadata(self) -> Metadata:
        """The same for torch, made anew."""
        kinds = {
            name: TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
            for name, (dtype, shape) in self.tensors.items()
        }
        for (name, offsets), chunk in self.chunks.items():
            sizes = torch.Size(chunk.sizes)
            kinds[name].chunks.append(ChunkStorageMetadata(torch.Size(offsets), sizes))
        stored = {
            MetadataIndex(name, offsets): chunk for (name, offsets), chunk in self.chunks.items()
        }
        return Metadata(kinds, storage_data=stored)

    def unfit(self, state: Mapping[str, Tensor]) -> str:
        """Why this cannot fill `state`, or ''."""
        for name, tensor in state.items():
            if name not in self.tensors:
                return f"it holds no tensor {name}"
            shape = self.tensors[name][1]
            if shape != tuple(tensor.size()):
                return f"its {name} is of shape {shape} instead of {tuple(tensor.size())}"
        return ""


def parse(data: bytes, sizes: Mapping[str, int]) -> Contents:
    """What the bytes of a ``.metadata`` say; `sizes` are those of the checkpoint's files, in bytes.

    Raises Refused where they do not say it as torch does, or say what cannot be.
    """
    table = _fields(plain_pickle.load(data, NAMES), "Metadata")
    stored = _stored(_field(table, "storage_data", dict), sizes)
    tensors: dict[str, tuple[torch.dtype, Shape]] = {}
    chunks: dict[tuple[str, Shape], Chunk] = {}
    left = len(stored)
    for name, kind in _field(table, "state_dict_metadata", dict).items():
        tensors[_name(name)] = dtype, shape = _tensor(name, kind)
        left -= len(_field(kind.state, "chunks", list))
        if left < 0:
            raise Refused("there are more parts of tensors than places in files")
        parts = _parts(kind.state["chunks"], shape)
        filled = sum(math.prod(sizes) for sizes in parts.values())
        if filled != math.prod(shape):
            raise Refused(f"the parts of {name} do not fill its shape {shape}")
        for offsets, part in parts.items():
            chunks[name, offsets] = _chunk(name, dtype, offsets, part, stored)
    return Contents(tensors, chunks)


def _tensor(name: str, kind: Any) -> tuple[torch.dtype, Shape]:
    if type(kind) is Named and kind.name == f"{_METADATA}.BytesStorageMetadata":
        raise Refused(f"{name} is an object, and only tensors are loaded")
    fields = _fields(kind, "TensorStorageMetadata")
    properties = _field(fields, "properties", Named)
    state = properties.state
    if properties.name != f"{_METADATA}.TensorProperties" or type(state) is not tuple or not state:
        raise Refused(f"the type of {name} is not told")
    found = state[0].name if type(state[0]) is Named and state[0].arguments is None else ""
    dtype = DTYPES.get(found.removeprefix("torch."))
    if dtype is None:
        raise Refused(f"the type of {name} is not known")
    return dtype, _shape(fields.get("size"))


def _parts(listed: list[Any], shape: Shape) -> dict[Shape, Shape]:
    """Sizes by offsets; those of ranks that hold nothing of the tensor are left out."""
    parts: dict[Shape, Shape] = {}
    for each in listed:
        fields = _fields(each, "ChunkStorageMetadata")
        offsets, sizes = _shape(fields.get("offsets")), _shape(fields.get("sizes"))
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=False)]
        if not len(offsets) == len(sizes) == len(shape) or any(map(int.__gt__, ends, shape)):
            raise Refused("a part lies outside its tensor")
        if offsets in parts and math.prod(sizes):
            raise Refused("a part stands twice")
        if math.prod(sizes):
            parts[offsets] = sizes
    return parts


def _chunk(
    name: str, dtype: torch.dtype, offsets: Shape, sizes: Shape, stored: dict[Any, Any]
) -> Chunk:
    where = stored.pop((name, offsets), None)
    if where is None:
        raise Refused(f"a part of {name} has no place in a file")
    file, start, length = where
    if math.prod(sizes) * dtype.itemsize > length:
        raise Refused(f"{name} claims more bytes than are stored")
    return Chunk(name, dtype, offsets, sizes, file, start, length)


def _stored(table: dict[Any, Any], sizes: Mapping[str, int]) -> dict[tuple[str, Shape], Any]:
    """File, first byte and length, by tensor and offsets; no byte belongs to two."""
    found: dict[tuple[str, Shape], Any] = {}
    for index, info in table.items():
        key = _fields(index, "MetadataIndex")
        name, offsets = _name(key.get("fqn")), _shape(key.get("offset"))
        if (name, offsets) in found:
            raise Refused(f"a part of {name} has two places")
        found[name, offsets] = _place(info, sizes)
    ends: dict[str, int] = {}
    for file, start, length in sorted(found.values()):
        if start < ends.get(file, 0):
            raise Refused(f"two parts share bytes of {file}")
        ends[file] = start + length
    return found


def _place(info: Any, sizes: Mapping[str, int]) -> tuple[str, int, int]:
    fields = _fields(info, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
    file = _field(fields, "relative_path", str)
    start, length = _field(fields, "offset", int), _field(fields, "length", int)
    if fields.get("transform_descriptors"):
        raise Refused("its bytes are transformed, which this trainer never does")
    if file not in sizes:
        raise Refused(f"{ascii(file)[:100]} is none of its files")
    if start < 0 or length < 1 or start + length > sizes[file]:
        raise Refused(f"bytes {start} to {start + length} lie outside {file}")
    return file, start, length


def _fields(value: Any, kind: str, module: str = _METADATA) -> dict[str, Any]:
    """The fields of an object of a known class."""
    fields = value.state if type(value) is Named and value.name == f"{module}.{kind}" else None
    if type(fields) is not dict:
        raise Refused(f"it holds something else in place of a {kind}")
    return fields


def _field(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise Refused(f"its {name} is a {type(value).__name__} and not a {kind.__name__}")
    return value


def _name(value: Any) -> str:
    if type(value) is not str or not 0 < len(value) <= LONGEST or not value.isprintable():
        raise Refused("it holds a tensor without a proper name")
    return value


def _shape(value: Any) -> Shape:
    if type(value) is Named and value.name == "torch.Size" and len(value.arguments or ()) == 1:
        (numbers,) = value.arguments or ()
        if type(numbers) is tuple and len(numbers) <= MOST_AXES and all(map(_is_size, numbers)):
            return numbers
    raise Refused("it holds something else in place of a shape")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
