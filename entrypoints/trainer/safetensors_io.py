"""Weights as safetensors files: a JSON header, then the elements; nothing in a file can run.

The format: https://github.com/huggingface/safetensors#format. Reading takes no more memory than
the file has bytes.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.safe_pickle import InvalidFile
from trainer.tensor_reader import open_regular_file

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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Entry(NamedTuple):
    """A tensor in the header; entries sort by their position in the file."""

    start: int
    """First byte after the header."""
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


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file that `write` made. Raises OSError and InvalidFile."""
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
        return _read_tensors(file, header, size - 8 - length)


def _read_tensors(file: io.BufferedReader, header: dict[str, Any], size: int) -> dict[str, Tensor]:
    """Read the tensors in file order; each must start where the one before it ends."""
    tensors, end = {}, 0
    entries = [_entry(name, fields) for name, fields in header.items()]
    for entry in sorted(entries, key=lambda entry: entry[:2]):
        if entry.start != end or end + entry.length > size:
            raise InvalidFile(f"the data of {ascii(entry.name)[:100]} overlaps or leaves a gap")
        end += entry.length
        content = bytearray(entry.length)
        if file.readinto(content) != entry.length:
            raise InvalidFile("the file was truncated while it was read")
        flat = torch.empty(0, dtype=entry.dtype)
        if entry.length:
            flat = torch.frombuffer(content, dtype=entry.dtype)
        tensors[entry.name] = flat.reshape(entry.shape)
    return tensors


def _entry(name: str, fields: Any) -> _Entry:
    if type(fields) is dict:
        shape, offsets = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
        dtype = DTYPES.get(str(fields.get("dtype"))[:9])
        if dtype and shape is not None and offsets is not None and len(offsets) == 2:  # noqa: PLR2004
            length = math.prod(shape) * dtype.itemsize
            if offsets[1] - offsets[0] == length:
                return _Entry(offsets[0], length, name, dtype, shape)
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
