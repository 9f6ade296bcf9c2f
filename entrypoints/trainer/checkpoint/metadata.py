"""A parser for a checkpoint's ``.metadata`` file, written by torch.distributed.checkpoint.

The file is untrusted. Each tensor must consist of chunks that lie inside it, fill it, and are
backed by bytes of a checkpoint file that no other chunk claims. A reader therefore never allocates
more memory than there is data on the disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import safe_pickle
from trainer.checkpoint.safe_pickle import InvalidFile, PickledObject

MAX_BYTES = 64 * 2**20
"""Maximum size of a ``.metadata`` file; a chunk takes about 200 bytes."""
MAX_NAME_LENGTH = 1000
"""Maximum length of a tensor's name, in characters."""
MAX_DIMENSIONS = 64
"""torch's own limit."""
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
ALLOWED_NAMES = frozenset(
    {
        *((_METADATA, name) for name in _CLASSES),
        *(("torch", name) for name in DTYPES),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
        ("builtins", "getattr"),  # Python 3.11.0 to 3.11.3: a member of _MEM_FORMAT_ENCODING
    }
)
"""Every (module, name) in a ``.metadata`` file written by torch 2.6 to 2.13; none is called."""

Shape = tuple[int, ...]
_Location = tuple[str, int, int]
"""File, first byte and length."""


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor, and the bytes of a file that store it."""

    tensor: str
    dtype: torch.dtype
    offsets: Shape
    """Index of its first element in the tensor."""
    sizes: Shape
    file: str
    start: int
    """First byte in the file."""
    length: int
    """In bytes."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """The tensors of a checkpoint, with dtype and shape, and the chunks that they consist of."""

    tensors: dict[str, tuple[torch.dtype, Shape]]
    chunks: dict[tuple[str, Shape], Chunk]
    """By tensor name and offsets."""

    def mismatch(self, state: Mapping[str, Tensor]) -> str:
        """Why the checkpoint cannot fill the tensors of `state`, or ''."""
        for name, tensor in state.items():
            if name not in self.tensors:
                return f"it has no tensor {name}"
            shape, expected = self.tensors[name][1], tuple(tensor.size())
            if shape != expected:
                return f"the shape of {name} is {shape}, expected {expected}"
        return ""


def parse(data: bytes, sizes: Mapping[str, int]) -> CheckpointMetadata:
    """Parse the content of a ``.metadata`` file.

    `sizes` holds the size of each file of the checkpoint, in bytes. Raises InvalidFile if the
    content is not what torch writes, or contradicts itself or the files.
    """
    table = _fields(safe_pickle.load(data, ALLOWED_NAMES), "Metadata")
    locations = _locations(_field(table, "storage_data", dict), sizes)
    tensors: dict[str, tuple[torch.dtype, Shape]] = {}
    chunks: dict[tuple[str, Shape], Chunk] = {}
    unassigned = len(locations)
    for name, kind in _field(table, "state_dict_metadata", dict).items():
        tensors[_name(name)] = dtype, shape = _dtype_and_shape(name, kind)
        unassigned -= len(_field(kind.state, "chunks", list))
        if unassigned < 0:
            raise InvalidFile("there are more tensor chunks than stored chunks")
        sizes_by_offset = _chunk_sizes(kind.state["chunks"], shape)
        if sum(math.prod(each) for each in sizes_by_offset.values()) != math.prod(shape):
            raise InvalidFile(f"the chunks of {name} do not fill its shape {shape}")
        for offsets, each in sizes_by_offset.items():
            chunks[name, offsets] = _chunk(name, dtype, offsets, each, locations)
    return CheckpointMetadata(tensors, chunks)


def _dtype_and_shape(name: str, kind: Any) -> tuple[torch.dtype, Shape]:
    if type(kind) is PickledObject and kind.name == f"{_METADATA}.BytesStorageMetadata":
        raise InvalidFile(f"{name} is an object; only tensors are loaded")
    fields = _fields(kind, "TensorStorageMetadata")
    properties = _field(fields, "properties", PickledObject)
    state = properties.state
    if properties.name != f"{_METADATA}.TensorProperties" or type(state) is not tuple or not state:
        raise InvalidFile(f"the dtype of {name} is missing")
    is_class = type(state[0]) is PickledObject and state[0].arguments is None
    dtype = DTYPES.get(state[0].name.removeprefix("torch.")) if is_class else None
    if dtype is None:
        raise InvalidFile(f"the dtype of {name} is unknown")
    return dtype, _shape(fields.get("size"))


def _chunk_sizes(chunks: list[Any], shape: Shape) -> dict[Shape, Shape]:
    """Sizes by offsets, without the empty chunks of ranks that hold nothing of the tensor."""
    sizes_by_offset: dict[Shape, Shape] = {}
    for chunk in chunks:
        fields = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _shape(fields.get("offsets")), _shape(fields.get("sizes"))
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=False)]
        if not len(offsets) == len(sizes) == len(shape) or any(map(int.__gt__, ends, shape)):
            raise InvalidFile("a chunk lies outside its tensor")
        if 0 in sizes:
            continue
        if offsets in sizes_by_offset:
            raise InvalidFile("a tensor has two chunks at the same offsets")
        sizes_by_offset[offsets] = sizes
    return sizes_by_offset


def _chunk(
    name: str,
    dtype: torch.dtype,
    offsets: Shape,
    sizes: Shape,
    locations: dict[tuple[str, Shape], _Location],
) -> Chunk:
    location = locations.pop((name, offsets), None)
    if location is None:
        raise InvalidFile(f"a chunk of {name} is not stored in any file")
    file, start, length = location
    if math.prod(sizes) * dtype.itemsize > length:
        raise InvalidFile(f"{name} claims more bytes than are stored")
    return Chunk(name, dtype, offsets, sizes, file, start, length)


def _locations(
    table: dict[Any, Any], sizes: Mapping[str, int]
) -> dict[tuple[str, Shape], _Location]:
    """Locations by tensor name and offsets; no byte belongs to two chunks."""
    locations: dict[tuple[str, Shape], _Location] = {}
    for index, info in table.items():
        key = _fields(index, "MetadataIndex")
        name, offsets = _name(key.get("fqn")), _shape(key.get("offset"))
        if (name, offsets) in locations:
            raise InvalidFile(f"a chunk of {name} is stored twice")
        locations[name, offsets] = _location(info, sizes)
    ends: dict[str, int] = {}
    for file, start, length in sorted(locations.values()):
        if start < ends.get(file, 0):
            raise InvalidFile(f"two chunks share bytes of {file}")
        ends[file] = start + length
    return locations


def _location(info: Any, sizes: Mapping[str, int]) -> _Location:
    fields = _fields(info, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
    file = _field(fields, "relative_path", str)
    start, length = _field(fields, "offset", int), _field(fields, "length", int)
    if fields.get("transform_descriptors"):
        raise InvalidFile(
            "its bytes are transformed (compressed, for example), which this trainer never does"
        )
    if file not in sizes:
        raise InvalidFile(f"{ascii(file)[:100]} is not one of its files")
    if start < 0 or length < 1 or start + length > sizes[file]:
        raise InvalidFile(f"bytes {start} to {start + length} lie outside {file}")
    return file, start, length


def _fields(value: Any, kind: str, module: str = _METADATA) -> dict[str, Any]:
    """The fields of a pickled object, which must be of class `module`.`kind`."""
    is_kind = type(value) is PickledObject and value.name == f"{module}.{kind}"
    fields = value.state if is_kind else None
    if type(fields) is not dict:
        raise InvalidFile(f"it has an unexpected object in place of a {kind}")
    return fields


def _field(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise InvalidFile(f"its {name} is a {type(value).__name__}, expected a {kind.__name__}")
    return value


def _name(value: Any) -> str:
    if type(value) is not str or not 0 < len(value) <= MAX_NAME_LENGTH or not value.isprintable():
        raise InvalidFile("a tensor has an invalid name")
    return value


def _shape(value: Any) -> Shape:
    if type(value) is PickledObject and value.name == "torch.Size" and value.arguments:
        shape, *others = value.arguments
        is_tuple = type(shape) is tuple and len(shape) <= MAX_DIMENSIONS and not others
        if is_tuple and all(map(_is_size, shape)):
            return tuple(shape)
    raise InvalidFile("it has an unexpected object in place of a shape")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
