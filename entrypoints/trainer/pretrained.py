"""Weights in safetensors files, such as those of a model of Hugging Face: read, and written.

A file is read tensor by tensor, and each rank keeps its part: no rank ever holds the whole model.
Nothing in a file can run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.parallel import shards

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Of a model in one file, and in several."""
MAX_FILE = 5 * 2**30
"""Bytes of weights in a file that is written."""
SHOWN = 3
"""Names in an error message."""
Source = Callable[[str], str | None]


class Pretrained:
    """The weights at `path`: a file, or a folder with one or with several and an index, or a
    checkpoint of the trainer, of any strategy, or the latest of a folder of them.

    `source` says which of them a tensor of the model gets, by their names; see
    `Task.pretrained_name`. Raises ConfigError if there are none, or without safetensors.
    """

    def __init__(self, path: Path, source: Source | None = None) -> None:
        self._path = path
        self._source = source or str
        try:
            files = [_Checkpoint(path)] if _has_checkpoints(path) else _opened(_files(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--init-from {path}: {error}") from None
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no dictionary

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError, with all problems, if these are not the weights of `model`.

        Weights with the names of the model, such as those of a run, are not translated.
        """
        if self._files.keys() == model.state_dict().keys():
            self._source = str
        tensors = ((self._source(name), tensor) for name, tensor in model.state_dict().items())
        expected = {name: tensor.shape for name, tensor in tensors if name is not None}
        ties = [{self._source(name) for name in names} for names in shards.tied(model)]
        tied = [names for names in ties if not self._files.keys().isdisjoint(names)]
        given = self._files.keys() | {name for names in tied for name in names}
        problems = [
            _named("lack", expected.keys() - given),
            _named("have extra", self._files.keys() - expected.keys()),
            *(self._mismatch(name, tuple(shape)) for name, shape in expected.items()),
        ]
        if messages := [*filter(None, problems)]:
            raise ConfigError(
                f"--init-from {self._path}: the weights {'; '.join(messages[:SHOWN])}"
            )

    def _mismatch(self, name: str, expected: tuple[int, ...]) -> str:
        if name not in self._files:
            return ""
        shape = tuple(self._files[name].get_slice(name).get_shape())
        if shape == expected:
            return ""
        return f"have {name} with shape {shape}, but the model expects {expected}"

    @torch.no_grad()
    def load(self, part: nn.Module) -> None:
        """Copy the weights to `part` of the model, whatever its layout."""
        for name, tensor in part.state_dict(keep_vars=True).items():
            source = self._source(name)
            if source is not None and source in self._files:
                weights = self._files[source].get_tensor(source)
                shards.copy_part(tensor, weights.to(tensor.dtype))


class _Checkpoint:
    """The trained weights of a checkpoint, read one by one, as from a safetensors file."""

    def __init__(self, path: Path) -> None:
        from trainer.checkpoint import checkpointer, dcp_files

        latest = checkpointer.find_latest(path)
        self._stored, self._sizes = checkpointer.weight_names(latest.tensors), latest.tensors
        self._read = partial(dcp_files.read, latest.path, latest.metadata)

    def keys(self) -> Iterable[str]:
        return self._stored.keys()

    def get_slice(self, name: str) -> Any:
        return SimpleNamespace(get_shape=lambda: self._sizes[self._stored[name]][1])

    def get_tensor(self, name: str) -> Tensor:
        stored = self._stored[name]
        return self._read({stored})[stored]


def _has_checkpoints(path: Path) -> bool:
    return (path / "whole.json").is_file() or any(path.glob("step-*/whole.json"))


def _opened(files: Iterable[Path]) -> list[Any]:
    """Raises ConfigError without safetensors, OSError or ValueError for what is not such a file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:  # not every environment with torch has it
        raise ConfigError("safetensors is not installed: pip install safetensors") from None
    try:
        return [safe_open(file, framework="pt") for file in files]
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def write_weights(
    weights: Mapping[str, Tensor], folder: Path, max_bytes: int = MAX_FILE
) -> list[Path]:
    """Write named tensors to files of at most `max_bytes`, or one tensor, and return the files.

    Several files have an index, ``model.safetensors.index.json``, as those of Hugging Face.
    """
    from safetensors.torch import save_file

    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if parts[-1] and size + tensor.nbytes > max_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    count = len(parts)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    paths = [folder / name for name in (names if count > 1 else [SINGLE])]
    for part, path in zip(parts, paths, strict=True):
        save_file(part, path, {"format": "pt"})
    if count == 1:
        return paths
    table = {name: path.name for part, path in zip(parts, paths, strict=True) for name in part}
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": table}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return [*paths, folder / INDEX]


def _files(path: Path) -> list[Path]:
    """Raise OSError without an index that can be read, ValueError if it is none."""
    if not path.is_dir():
        return [path]
    if not (path / INDEX).exists():
        return [path / SINGLE]
    try:
        names = sorted(map(str, {*json.loads((path / INDEX).read_text())["weight_map"].values()}))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{INDEX} is not a valid safetensors index") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise ValueError(
            f"{INDEX} names {ascii(outside[0])[:100]}, which is not in the same folder"
        )
    return [path / name for name in names]


def _named(verb: str, names: Iterable[str]) -> str:
    """Names in words, such as "lack a.weight, b.weight and 3 others"; '' without any."""
    known = sorted(ascii(name)[1:101] if not name.isprintable() else name[:100] for name in names)
    if not known:
        return ""
    more = f" and {len(known) - SHOWN} others" if len(known) > SHOWN else ""
    return f"{verb} {', '.join(known[:SHOWN])}{more}"
