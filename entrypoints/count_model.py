"""Count a model's parameters without allocating them: ``count_model.py module:function``.

The function is called with PyTorch's meta device as the default, on which tensors have shapes but
no data (https://docs.pytorch.org/docs/stable/meta.html). Prints one line of JSON: name and shape of
the parameters of the embeddings, of one of the repeated blocks and of the rest, and the number of
blocks. `deploykit advise --model` runs this file, because deploykit itself does not use PyTorch.
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

NamedShapes = list[tuple[str, list[int]]]


def main() -> None:
    """Run the command line; exits with code 1 if the function does not return a module."""
    module, _, function = sys.argv[1].partition(":")
    sys.path.insert(0, str(Path.cwd()))
    with torch.device("meta"):
        model = getattr(importlib.import_module(module), function)()
    if not isinstance(model, nn.Module):
        sys.exit(f"{sys.argv[1]} returned {type(model).__name__}, not a torch.nn.Module")
    print(json.dumps(count(model)))


def count(model: nn.Module) -> dict[str, Any]:
    """The model's parameters by part; shared parameters count once, where they come first."""
    blocks = _blocks(model)
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    tables = [layer for layer in model.modules() if isinstance(layer, nn.Embedding)]
    embedded = {id(parameter) for table in tables for parameter in table.parameters()} - in_blocks
    rest = [pair for pair in model.named_parameters() if id(pair[1]) not in in_blocks]
    return {
        "layers": len(blocks),
        "block": _shapes(blocks[0].named_parameters()) if blocks else [],
        "embedding": _shapes(pair for pair in rest if id(pair[1]) in embedded),
        "head": _shapes(pair for pair in rest if id(pair[1]) not in embedded),
    }


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The largest group of sibling layers with the same parameters, or none."""
    largest: list[nn.Module] = []
    for parent in model.modules():
        groups: dict[str, list[nn.Module]] = {}
        for child in parent.children():
            groups.setdefault(str(_shapes(child.named_parameters())), []).append(child)
        for group in groups.values():
            if len(group) > 1 and _size(group) > _size(largest):
                largest = group
    return largest


def _shapes(parameters: Iterable[tuple[str, nn.Parameter]]) -> NamedShapes:
    return [(name, list(parameter.shape)) for name, parameter in parameters]


def _size(layers: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


if __name__ == "__main__":
    main()
