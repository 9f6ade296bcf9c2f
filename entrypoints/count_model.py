"""Count a model's parameters without memory for them: ``count_model.py module:function``.

The function is called with PyTorch's meta device as the default, on which tensors have shapes and
no data (https://docs.pytorch.org/docs/stable/meta.html). Prints one line of JSON: the parameters
(name and shape) of the embeddings, of one of the equal blocks, of the rest, and how many blocks
there are. `deploykit advise --model` runs this, since deploykit itself does without torch.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Shapes = list[tuple[str, list[int]]]


def main() -> None:
    module, _, function = sys.argv[1].partition(":")
    sys.path.insert(0, str(Path.cwd()))
    with torch.device("meta"):
        model = getattr(importlib.import_module(module), function)()
    if not isinstance(model, nn.Module):
        sys.exit(f"{sys.argv[1]} gave {type(model).__name__}, not a torch.nn.Module")
    print(json.dumps(counted(model)))


def counted(model: nn.Module) -> dict[str, Any]:
    """The model's parameters by layer; a shared one counts where it is first."""
    blocks = _blocks(model)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    tables = [layer for layer in model.modules() if isinstance(layer, nn.Embedding)]
    looked_up = {id(parameter) for table in tables for parameter in table.parameters()} - inside
    rest = [pair for pair in model.named_parameters() if id(pair[1]) not in inside]
    return {
        "layers": len(blocks),
        "block": _shapes(blocks[0].named_parameters()) if blocks else [],
        "embedding": _shapes(pair for pair in rest if id(pair[1]) in looked_up),
        "head": _shapes(pair for pair in rest if id(pair[1]) not in looked_up),
    }


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The largest group of layers side by side with the same parameters; none if there is none."""
    best: list[nn.Module] = []
    for parent in model.modules():
        groups: dict[str, list[nn.Module]] = {}
        for child in parent.children():
            groups.setdefault(str(_shapes(child.named_parameters())), []).append(child)
        for group in groups.values():
            if len(group) > 1 and _size(group) > _size(best):
                best = group
    return best


def _shapes(named: Iterable[tuple[str, nn.Parameter]]) -> Shapes:
    return [(name, list(parameter.shape)) for name, parameter in named]


def _size(layers: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


if __name__ == "__main__":
    main()
