"""Parts of tensors that several ranks share, without importing DTensor, which takes 0.7 s."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this rank; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    part: Tensor = to_local() if to_local else tensor
    return part


def whole(tree: Any) -> Any:
    """A structure of tensors in which DTensors have the parts of all ranks. Collective."""
    return pytree.tree_map_only(Tensor, _whole, tree)


def _whole(tensor: Tensor) -> Tensor:
    full_tensor = getattr(tensor, "full_tensor", None)
    full: Tensor = full_tensor() if full_tensor else tensor
    return full
