"""The layers of a model, which are sharded, recomputed and compiled one by one; and its modes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trainer.checkpoint.stored_state import with_extra_state

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
    # not copy.copy: what `fully_shard` has sharded calls __init__ then
    made: nn.Module = object.__new__(type(module))
    vars(made).update(vars(module))  # its tables are shared
    for table in ("_parameters", "_buffers", "_modules"):
        vars(made)[table] = dict(vars(module)[table])
    return made


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


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode in the block; then each module is in its own mode again.

    `train()` would also thaw the modules that are meant to stay in evaluation mode.
    """
    modules = [module for model in models for module in model.modules()]
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the model's buffers, extra state and the random numbers after the block."""
    before = [buffer.clone() for buffer in model.buffers()]
    extra = [
        (module, copy.deepcopy(module.get_extra_state())) for _, module in with_extra_state(model)
    ]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    for module, state in extra:
        module.set_extra_state(state)
