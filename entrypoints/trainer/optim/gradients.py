"""Norm and scaling of gradients that are sharded in any way, and loss scaling for fp16."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from trainer.parallel.shards import local

_INITIAL_FACTOR = 65536.0
_GROWTH_INTERVAL = 2000
"""Both are the defaults of `torch.amp.GradScaler`."""


def norm(
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    model_parallel_groups: Sequence[ProcessGroup] = (),
) -> Tensor:
    """The 2-norm of the whole model's gradient, a scalar tensor equal on every rank. Collective.

    Sums over ranks are on `device`: NCCL cannot add up gradients offloaded to CPU memory.
    Shards of a DTensor are summed over the ranks that hold the others; replicas count once.
    `model_parallel_groups` are groups whose ranks hold different parameters, such as pipeline
    stages. torch's `clip_grad_norm_` cannot be used: it refuses a model in which only some
    parameters are DTensors.
    """
    shards: dict[tuple[ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            shard, groups = _local_shard(parameter.grad)
            shards[groups].append(shard)
    squares = [_all_reduce(_square(held).to(device), groups) for groups, held in shards.items()]
    own = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    return _all_reduce(own, model_parallel_groups).sqrt()


def scale(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiply all gradients by `factor`, in place."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _local_shard(gradient: Tensor) -> tuple[Tensor, tuple[ProcessGroup, ...]]:
    """The local shard of a gradient, and the groups over which the other shards lie."""
    if not hasattr(gradient, "device_mesh"):
        return gradient, ()
    sharded: Any = gradient
    mesh = sharded.device_mesh
    if any(placement.is_partial() for placement in sharded.placements):
        from torch.distributed.tensor import Replicate

        sharded = sharded.redistribute(mesh, [Replicate()] * mesh.ndim)
    # not is_shard(): it is false for a tensor that TP and FSDP have both sharded (_StridedShard)
    axes = [axis for axis, placed in enumerate(sharded.placements) if not placed.is_replicate()]
    return sharded.to_local(), tuple(mesh.get_group(axis) for axis in axes)


def _square(gradients: list[Tensor]) -> Tensor:
    """The sum of the squares, with the kernel that torch's own clipping uses."""
    return torch.stack(torch._foreach_norm(gradients)).square().sum()  # noqa: SLF001


def _all_reduce(value: Tensor, groups: Iterable[ProcessGroup]) -> Tensor:
    for group in groups:
        distributed.all_reduce(value, group=group)
    return value


class LossScaler:
    """The factor of the loss, which keeps small gradients from underflowing to zero in fp16.

    It is halved when a gradient overflows, and doubled after 2000 steps without overflow.

    `torch.amp.GradScaler` checks the gradients of its own rank. Those differ between ranks under
    tensor and pipeline parallelism, and ranks would disagree. Here the norm of the whole model's
    gradient decides, which is the same on every rank.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.factor = _INITIAL_FACTOR if enabled else 1.0
        self._steps_without_overflow = 0

    def update(self, norm: float) -> bool:
        """Adapt the factor to the norm of the gradients; False if this step must be skipped."""
        if not self.enabled:
            return True
        if not math.isfinite(norm):
            self.factor, self._steps_without_overflow = self.factor / 2, 0
            return False
        self._steps_without_overflow += 1
        if self._steps_without_overflow == _GROWTH_INTERVAL:
            self.factor, self._steps_without_overflow = self.factor * 2, 0
        return True
