"""Norms and clipping that are right however the gradients are spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate


def norm(parameters: Iterable[nn.Parameter], apart: Sequence[ProcessGroup] = ()) -> Tensor:
    """The 2-norm of the whole model's gradient, the same on every rank.

    Pieces of sharded tensors are added up over the ranks that hold the others, copies once;
    `apart` are groups whose ranks hold different parameters altogether (pipeline stages).
    torch's own `clip_grad_norm_` refuses a model of which only some tensors are sharded.
    """
    pieces: dict[tuple[ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            held, groups = _held(parameter.grad)
            pieces[groups].append(held)
    squares = [_summed(_square(held), groups) for groups, held in pieces.items()]
    return _summed(torch.stack(squares).sum(), apart).sqrt()


def scale(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiply all gradients by `factor`."""
    found = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(found, factor)


def _held(gradient: Tensor) -> tuple[Tensor, tuple[ProcessGroup, ...]]:
    """What this rank holds of a gradient, and the groups that hold the rest of it."""
    if not isinstance(gradient, DTensor):
        return gradient, ()
    mesh = gradient.device_mesh
    if any(placement.is_partial() for placement in gradient.placements):
        gradient = gradient.redistribute(mesh, [Replicate()] * mesh.ndim)
    # not is_shard(), which is false for the pieces of a tensor that two methods have cut
    sharded = [axis for axis, way in enumerate(gradient.placements) if not way.is_replicate()]
    return gradient.to_local(), tuple(mesh.get_group(axis) for axis in sharded)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _square(held: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(held)).square().sum()  # noqa: SLF001 - as torch clips


def _summed(value: Tensor, groups: Iterable[ProcessGroup]) -> Tensor:
    for group in groups:
        distributed.all_reduce(value, group=group)
    return value
