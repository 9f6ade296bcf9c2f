"""Checkpoint files by torch.distributed.checkpoint (DCP), of which none can run code.

Importing DCP takes 0.7 s, for which the first step does not wait: this module is imported in the
functions that use it.

DCP reads tensors by ``torch.load(weights_only=True)``, but unpickles ``.metadata``, the table of
them. Here the objects of a table are inert stand-ins, of which torch's own are built.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.checkpoint.stored_state import unpack
from trainer.errors import InvalidFile

_MAX_NAME = 1000
"""Characters of a tensor's name."""


def save(state: dict[str, Tensor], folder: Path, group: ProcessGroup) -> None:
    """Write tensors to `folder`, each rank its shards. Collective."""
    dcp.save(
        state,
        storage_writer=FileSystemWriter(folder),
        planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        process_group=group,
    )


def load(state: dict[str, Tensor], folder: Path, metadata: Metadata, group: ProcessGroup) -> None:
    """Fill `state` in place from `folder`, saved with any strategy. Collective."""
    reader, planner = _Reader(folder, metadata), _TensorPlanner()
    dcp.load(state, storage_reader=reader, planner=planner, process_group=group)


class _Reader(FileSystemReader):
    """Reads with a table that `parse` has checked."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        return self._metadata


class _TensorPlanner(DefaultLoadPlanner):
    """Refuses objects, which torch's planner would unpickle."""

    def load_bytes(self, *_item_and_bytes: Any) -> None:
        raise InvalidFile("it contains an object; only tensors are loaded")


def read(
    folder: Path, metadata: Metadata, names: Container[str] | None = None
) -> dict[str, Tensor]:
    """Read tensors of a checkpoint, by default all, unsharded, in one process without a group."""
    state = {
        name: torch.zeros(kind.size, dtype=kind.properties.dtype)
        for name, kind in _tensors(metadata).items()
        if names is None or name in names
    }
    for name, chunk, tensor in _chunks(folder, metadata, names=names):
        ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
        state[name][tuple(map(slice, chunk.offsets, ends))].copy_(tensor)
    return state


def check(folder: Path, metadata: Metadata, files: Container[str]) -> None:
    """Raise InvalidFile unless each chunk in these `files` is a tensor as the table has it."""
    for name, chunk, tensor in _chunks(folder, metadata, files):
        dtype = _tensors(metadata)[name].properties.dtype
        if type(tensor) is not Tensor or (tensor.dtype, tensor.size()) != (dtype, chunk.sizes):
            raise InvalidFile(f"the stored tensor {name} does not match the metadata")


def _chunks(
    folder: Path,
    metadata: Metadata,
    files: Container[str] | None = None,
    names: Container[str] | None = None,
) -> Iterator[tuple[str, ChunkStorageMetadata, Tensor]]:
    """The chunks of a checkpoint that are in `files` and of tensors `names`, by default all."""
    for name, kind in _tensors(metadata).items():
        if names is not None and name not in names:
            continue
        for chunk in kind.chunks:
            info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            if files is None or info.relative_path in files:
                with (folder / info.relative_path).open("rb") as file:
                    file.seek(info.offset)
                    yield name, chunk, unpack(name, file.read(info.length))


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors of a table that `parse` has made, which has nothing else."""
    return cast("dict[str, TensorStorageMetadata]", metadata.state_dict_metadata)


class _StandIn:
    """For an object in a table: the arguments that its class was given, and its state."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> Self:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Has a stand-in for each class or function that a table names, and imports nothing."""

    def find_class(self, _module: str, name: str) -> type[_StandIn]:
        return type(name, (_StandIn,), {})


def parse(data: bytes, sizes: Mapping[str, int]) -> Metadata:
    """The table in a ``.metadata`` file. `sizes` has the bytes of each file of the checkpoint.

    Raises InvalidFile if torch has not written it, or if it contradicts itself or the files.
    """
    try:
        table = _state(_unpickled(data), "Metadata")
        infos = _storage(table["storage_data"], sizes)
        tensors = {
            name: _tensor(name, kind, infos) for name, kind in table["state_dict_metadata"].items()
        }
    except InvalidFile:
        raise
    except Exception as error:  # noqa: BLE001 - wrong types raise anything
        raise InvalidFile(f"invalid pickle in .metadata ({type(error).__name__})") from None
    stored = {MetadataIndex(name, offsets): info for (name, offsets), info in infos.items()}
    return Metadata(dict(tensors), storage_data=stored)


def _unpickled(data: bytes) -> Any:
    for opcode, number, _position in pickletools.genops(data):
        if opcode.name in ("PUT", "LONG_BINPUT") and (number or 0) > len(data):
            raise InvalidFile("invalid pickle in .metadata")  # Python would allocate that much
    return _Unpickler(io.BytesIO(data)).load()


def _storage(
    table: dict[_StandIn, _StandIn], sizes: Mapping[str, int]
) -> dict[tuple[str, torch.Size], _StorageInfo]:
    """Where chunks are, by tensor and offsets; no byte belongs to two of them."""
    infos = {}
    for index, info in table.items():
        key, fields = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        file, start, length = fields["relative_path"], fields["offset"], fields["length"]
        if fields.get("transform_descriptors"):
            raise InvalidFile("its data is encoded, for example compressed")
        if file not in sizes:
            raise InvalidFile(f"{ascii(file)[:100]} is not part of the checkpoint")
        integers = type(start) is int and type(length) is int
        if not integers or start < 0 or length < 1 or start + length > sizes[file]:
            raise InvalidFile(f"a chunk lies outside {file}")
        infos[key["fqn"], _size(key["offset"])] = _StorageInfo(file, start, length)
    ends: dict[str, int] = {}
    for each in sorted(infos.values(), key=lambda each: each.offset):
        if each.offset < ends.get(each.relative_path, 0):
            raise InvalidFile(f"two chunks overlap in {each.relative_path}")
        ends[each.relative_path] = each.offset + each.length
    return infos


def _tensor(
    name: str, kind: _StandIn, infos: Mapping[tuple[str, torch.Size], _StorageInfo]
) -> TensorStorageMetadata:
    """The entry of a tensor, whose chunks lie inside it, fill it, and are stored."""
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise InvalidFile("a tensor has an invalid name")
    if type(kind).__name__ == "BytesStorageMetadata":
        raise InvalidFile(f"{name} is an object; only tensors are loaded")
    fields = _state(kind, "TensorStorageMetadata")
    dtype = getattr(torch, _state(fields["properties"], "TensorProperties")[0].__name__)
    shape = _size(fields["size"])
    chunks = {}
    for each in fields["chunks"]:
        part = _state(each, "ChunkStorageMetadata")
        offsets, sizes = _size(part["offsets"]), _size(part["sizes"])
        ends = map(sum, zip(offsets, sizes, strict=True))
        if any(end > length for end, length in zip(ends, shape, strict=True)):
            raise InvalidFile("a chunk lies outside its tensor")
        if 0 in sizes:  # of a rank that holds nothing of the tensor
            continue
        if (name, offsets) not in infos:
            raise InvalidFile(f"a chunk of {name} is not stored in any file")
        if math.prod(sizes) * dtype.itemsize > infos[name, offsets].length:
            raise InvalidFile(f"{name} declares more bytes than are stored")
        chunks[offsets] = ChunkStorageMetadata(offsets, sizes)
    if sum(math.prod(chunk.sizes) for chunk in chunks.values()) != math.prod(shape):
        raise InvalidFile(f"the chunks of {name} do not fill its shape {tuple(shape)}")
    return TensorStorageMetadata(TensorProperties(dtype), shape, [*chunks.values()])


def _state(value: Any, kind: str) -> Any:
    """The state of a stand-in for an object of the class `kind`."""
    if not isinstance(value, _StandIn) or type(value).__name__ != kind:
        raise InvalidFile(f"it contains an unexpected object in place of a {kind}")
    return value.state


def _size(value: _StandIn) -> torch.Size:
    (numbers,) = value.arguments
    if type(value).__name__ != "Size" or not all(
        type(number) is int and 0 <= number < 2**62 for number in numbers
    ):
        raise InvalidFile("it contains an unexpected object in place of a shape")
    return torch.Size(numbers)
