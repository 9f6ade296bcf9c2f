"""The layers of a model, which are sharded, recomputed and compiled one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from torch import nn

Find = Callable[[nn.Module], Sequence[nn.Module]]


def names(model: nn.Module, find: Find | None = None) -> list[str]:
    """The layers of `model` by name, in its order: those that `find` returns, or the obvious ones.

    These are the parts of an `nn.Sequential`, or the largest group of siblings of the same class,
    such as the blocks of a transformer, or else the parts of the model. Layers without parameters,
    and those that share parameters with others, are left out: they cannot be sharded alone.
    """
    chosen = {id(layer) for layer in (find or _obvious)(model)}
    named = [(name, layer) for name, layer in model.named_modules() if id(layer) in chosen]
    return [name for name, layer in named if name and _is_separate(layer, model)]


def twin(module: nn.Module) -> nn.Module:
    """A module of the same tensors and parts, which can be replaced without changing the other."""
    made = copy.copy(module)  # its tables are shared
    for table in ("_parameters", "_buffers", "_modules"):
        vars(made)[table] = dict(vars(module)[table])
    return made


def compile_each(model: nn.Module, layers: Sequence[str]) -> None:
    """Compile these layers one by one, in place."""
    for name in layers:
        model.get_submodule(name).compile()


def _obvious(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.Sequential):
        return list(model)
    largest: list[nn.Module] = []
    for parent in model.modules():
        groups: dict[type[nn.Module], list[nn.Module]] = {}
        for child in parent.children():
            groups.setdefault(type(child), []).append(child)
        for group in groups.values():
            if len(group) > 1 and _size(group) > _size(largest):
                largest = group
    return largest or list(model.children())


def _size(layers: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


def _is_separate(layer: nn.Module, model: nn.Module) -> bool:
    """Whether the layer has parameters, and no other module has one of them too."""
    own = {id(parameter) for parameter in layer.parameters()}
    inside = {id(module) for module in layer.modules()}
    others = (module for module in model.modules() if id(module) not in inside)
    return bool(own) and not any(
        id(parameter) in own for other in others for parameter in other.parameters(recurse=False)
    )
