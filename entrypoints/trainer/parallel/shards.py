"""Parts of tensors that several ranks share, without importing DTensor, which takes 0.7 s."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainer.errors import ConfigError


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this rank; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    part: Tensor = to_local() if to_local else tensor
    return part


def whole(tree: Any) -> Any:
    """A structure of tensors in which DTensors have the parts of all ranks. Collective."""
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf, tree
    )


def copy_part(tensor: Tensor, whole: Tensor) -> None:
    """Copy to `tensor` what it holds on this rank of `whole`, a plain tensor of its full shape."""
    sharded: Any = tensor.data
    if hasattr(sharded, "device_mesh"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, offsets = compute_local_shape_and_global_offset(
            sharded.shape, sharded.device_mesh, sharded.placements
        )
        for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            whole = whole.narrow(axis, min(offset, whole.shape[axis]), size)
    local(sharded).copy_(whole)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module by name, without those of its children."""
    return chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))


def tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [each for each in names.values() if len(each) > 1]


def tie(model: nn.Module, names: list[str]) -> None:
    """Make parameters that were one before they were sharded or allocated one again.

    Raises ConfigError if they are sharded differently.
    """
    first, *others = (model.get_parameter(name) for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if getattr(first, "placements", None) != getattr(other, "placements", None):
            raise ConfigError(
                f"{names[0]} and {name} are the same tensor, but the tensor-parallel plan shards "
                "it in two ways: shard both by their first dimension, or untie them"
            )
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, first)
