"""First weights from safetensors files, such as those of a model of Hugging Face.

A file is read tensor by tensor, and each rank keeps its part: no rank ever holds the whole model.
Nothing in a file can run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.checkpoint import safetensors_io
from trainer.checkpoint.safe_pickle import InvalidFile
from trainer.checkpoint.safetensors_io import INDEX, SINGLE, Entry
from trainer.checkpoint.tensor_reader import open_regular_file
from trainer.errors import ConfigError
from trainer.parallel import shards

MAX_INDEX = 2**26
"""Maximum size of an index in bytes; a tensor takes about 100."""
SHOWN = 3
"""Names in an error message."""
Source = Callable[[str], str | None]


class Pretrained:
    """The weights at `path`: a file, or a folder with one or with several and an index.

    `source` says which of them a tensor of the model gets, by their names; see
    `Task.pretrained_name`. Raises ConfigError if there are none.
    """

    def __init__(self, path: Path, source: Source | None = None) -> None:
        self._path = path
        self._source = source or str
        try:
            self._entries = {entry.name: (file, entry) for file, entry in _entries(path)}
        except (OSError, InvalidFile) as error:
            raise ConfigError(f"--init-from {path}: {error}") from None

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError, with all problems, if these are not the weights of `model`."""
        tensors = ((self._source(name), tensor) for name, tensor in model.state_dict().items())
        expected = {name: tensor for name, tensor in tensors if name is not None}
        ties = [{self._source(name) for name in names} for names in shards.tied(model)]
        tied = [names for names in ties if not self._entries.keys().isdisjoint(names)]
        given = self._entries.keys() | {name for names in tied for name in names}
        problems = [
            _named("lack", expected.keys() - given),
            _named("have, unlike the model,", self._entries.keys() - expected.keys()),
            *(self._mismatch(name, tensor) for name, tensor in expected.items()),
        ]
        if messages := [*filter(None, problems)]:
            raise ConfigError(
                f"--init-from {self._path}: the weights {'; '.join(messages[:SHOWN])}"
            )

    def _mismatch(self, name: str, tensor: Tensor) -> str:
        if name not in self._entries:
            return ""
        shape = self._entries[name][1].shape
        if list(tensor.shape) == shape:
            return ""
        return f"have {name} with shape {tuple(shape)}, the model with {tuple(tensor.shape)}"

    @torch.no_grad()
    def load(self, part: nn.Module) -> None:
        """Copy the weights to `part` of the model, whatever its layout."""
        for name, tensor in part.state_dict(keep_vars=True).items():
            if (source := self._source(name)) in self._entries:
                weights = safetensors_io.load(*self._entries[source])
                shards.copy_part(tensor, weights.to(tensor.dtype))


def _entries(path: Path) -> Iterable[tuple[Path, Entry]]:
    """Each tensor and its file."""
    for file in _files(path):
        for entry in safetensors_io.entries(file):
            yield file, entry


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if not (path / INDEX).exists():
        return [path / SINGLE]
    with open_regular_file(path / INDEX) as file:
        text = file.read(MAX_INDEX)
    try:
        names = sorted({str(name) for name in json.loads(text)["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InvalidFile(f"{INDEX} is not an index of safetensors files") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise InvalidFile(f"{INDEX} names {ascii(outside[0])[:100]}, which is no file beside it")
    return [path / name for name in names]


def _named(verb: str, names: Iterable[str]) -> str:
    """Names in words, such as "lack a.weight, b.weight and 3 others"; '' without any."""
    known = sorted(ascii(name)[1:101] if not name.isprintable() else name[:100] for name in names)
    if not known:
        return ""
    more = f" and {len(known) - SHOWN} others" if len(known) > SHOWN else ""
    return f"{verb} {', '.join(known[:SHOWN])}{more}"
