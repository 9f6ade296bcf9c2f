"""Weights as safetensors: names and shapes in JSON, then numbers. Nothing in such a file can run.

The format: https://github.com/huggingface/safetensors#format. A reader takes no more memory than
the file has bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainer.chunks import open_plain
from trainer.plain_pickle import Refused

LARGEST_HEADER = 2**24
"""Bytes; a tensor takes some 100."""
TYPES = {
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
_WORDS = {dtype: word for word, dtype in TYPES.items()}


def write(weights: Mapping[str, Tensor], path: Path) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in weights.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)  # numbers begin where a processor likes them to
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for tensor in weights.values():
            file.write(_bytes(tensor))


def read(path: Path) -> dict[str, Tensor]:
    """Raises OSError, and Refused where the file is not what `write` makes."""
    with open_plain(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, LARGEST_HEADER):
            raise Refused(f"{path.name} is no file of safetensors")
        try:
            header = dict(json.loads(file.read(length)))
        except (ValueError, TypeError, RecursionError):
            raise Refused(f"the header of {path.name} is not JSON") from None
        header.pop("__metadata__", None)
        return _tensors(file, header, size - 8 - length)


def _tensors(file: BinaryIO, header: dict[str, Any], size: int) -> dict[str, Tensor]:
    """One after the other, as they lie in the file: so none shares bytes with another."""
    found, end = {}, 0
    places = [(*_place(name, about), name) for name, about in header.items()]
    for begin, length, dtype, shape, name in sorted(places, key=lambda place: place[:2]):
        if begin != end or end + length > size:
            raise Refused(f"{ascii(name)[:100]} does not lie behind the tensor before it")
        end += length
        content = bytearray(length)
        if file.readinto(content) != length:
            raise Refused("the file has become shorter")
        flat = torch.frombuffer(content, dtype=dtype) if length else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(shape)
    return found


def _place(name: str, about: Any) -> tuple[int, int, torch.dtype, list[int]]:
    """First byte, bytes, type and shape."""
    if type(about) is dict:
        shape, offsets = about.get("shape"), about.get("data_offsets")
        dtype = TYPES.get(str(about.get("dtype"))[:9])
        if dtype and _sizes(shape) and _sizes(offsets) and len(offsets) == 2:  # noqa: PLR2004
            length = math.prod(shape) * dtype.itemsize
            if offsets[1] - offsets[0] == length:
                return offsets[0], length, dtype, shape
    raise Refused(f"{ascii(name)[:100]} is not described as a tensor")


def _sizes(value: Any) -> bool:
    return type(value) is list and all(type(n) is int and 0 <= n < 2**62 for n in value)


def _bytes(tensor: Tensor) -> bytearray:
    content = bytearray(tensor.nbytes)
    if content:
        torch.frombuffer(content, dtype=tensor.dtype).copy_(tensor.detach().flatten())
    return content
