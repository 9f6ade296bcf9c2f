"""Weights as safetensors files: a JSON header, then the elements; nothing in a file can run.

The format: https://github.com/huggingface/safetensors#format. Reading takes no more memory than
the file has bytes, or with `load` one tensor of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.safe_pickle import InvalidFile
from trainer.checkpoint.tensor_reader import open_regular_file

MAX_HEADER = 2**24
"""Maximum size of the header in bytes; a tensor takes about 100."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Of a model in one file, and in several."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor in a file; entries sort by their position."""

    start: int
    """Its first byte: after the header, or in the file."""
    length: int
    """In bytes."""
    name: str
    dtype: torch.dtype
    shape: list[int]


def write(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write named tensors to `path`. Raises KeyError for a dtype that the format lacks."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in weights.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the elements are aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in weights.values():
            file.write(_bytes(tensor))


def write_sharded(weights: Mapping[str, Tensor], folder: Path, limit: int) -> list[Path]:
    """Write named tensors to files of at most `limit` bytes, or one tensor, and return the files.

    Several files have an index, ``model.safetensors.index.json``, as those of Hugging Face.
    """
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in weights.items():
        if parts[-1] and sum(each.nbytes for each in parts[-1].values()) + tensor.nbytes > limit:
            parts.append({})
        parts[-1][name] = tensor
    if len(parts) == 1:
        write(weights, folder / SINGLE)
        return [folder / SINGLE]
    paths = [
        folder / f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        for number in range(1, len(parts) + 1)
    ]
    for part, path in zip(parts, paths, strict=True):
        write(part, path)
    table = {name: path.name for part, path in zip(parts, paths, strict=True) for name in part}
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": table}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return [*paths, folder / INDEX]


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file. Raises OSError and InvalidFile."""
    return {entry.name: load(path, entry) for entry in entries(path)}


def entries(path: Path) -> list[Entry]:
    """The tensors of a file in its order, without their data. Raises OSError and InvalidFile."""
    with open_regular_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, MAX_HEADER):
            raise InvalidFile(f"{path.name} is not a safetensors file")
        try:
            header = dict(json.loads(file.read(length)))
        except (ValueError, TypeError, RecursionError):
            raise InvalidFile(f"the header of {path.name} is not valid JSON") from None
    header.pop("__metadata__", None)
    listed = [_entry(name, fields) for name, fields in header.items()]
    return _placed(sorted(listed, key=lambda entry: entry[:2]), 8 + length, size)


def _placed(listed: list[Entry], data: int, size: int) -> list[Entry]:
    """The entries with their position in the file; each must start where the one before it ends."""
    end = data
    for entry in listed:
        if data + entry.start != end or end + entry.length > size:
            raise InvalidFile(f"the data of {ascii(entry.name)[:100]} overlaps or leaves a gap")
        end += entry.length
    return [entry._replace(start=data + entry.start) for entry in listed]


def load(path: Path, entry: Entry) -> Tensor:
    """Read one tensor of a file. Raises OSError and InvalidFile."""
    content = bytearray(entry.length)
    with open_regular_file(path) as file:
        file.seek(entry.start)
        if file.readinto(content) != entry.length:
            raise InvalidFile("the file was truncated while it was read")
    flat = torch.empty(0, dtype=entry.dtype)
    if entry.length:
        flat = torch.frombuffer(content, dtype=entry.dtype)
    return flat.reshape(entry.shape)


def _entry(name: str, fields: Any) -> Entry:
    if type(fields) is dict:
        shape, offsets = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
        dtype = DTYPES.get(str(fields.get("dtype"))[:9])
        if dtype and shape is not None and offsets is not None and len(offsets) == 2:  # noqa: PLR2004
            length = math.prod(shape) * dtype.itemsize
            if offsets[1] - offsets[0] == length:
                return Entry(offsets[0], length, name, dtype, shape)
    raise InvalidFile(f"the header entry of {ascii(name)[:100]} does not describe a tensor")


def _sizes(value: Any) -> list[int] | None:
    """`value` if it is a list of non-negative integers, otherwise None."""
    if type(value) is list and all(type(n) is int and 0 <= n < 2**62 for n in value):
        return value
    return None


def _bytes(tensor: Tensor) -> bytearray:
    content = bytearray(tensor.nbytes)
    if content:
        torch.frombuffer(content, dtype=tensor.dtype).copy_(tensor.detach().flatten())
    return content
