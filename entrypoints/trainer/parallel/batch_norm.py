"""Batch normalization over the samples of all ranks, on GPUs and on CPUs.

torch's SyncBatchNorm does the same on GPUs only.
https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.data import DataShard


def synchronize(model: nn.Module, shard: DataShard) -> None:
    """Let the batch normalization of `model` use the samples of all data shards, in place.

    Statistics are those of a micro-batch of all ranks: with one micro-batch, of the global batch.
    """
    if shard.num_shards == 1:
        return
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not hasattr(module, "hollow"):
            layer: Any = module
            layer.forward = partial(_forward, module, shard)


def _forward(norm: _BatchNorm, shard: DataShard, inputs: Tensor) -> Tensor:
    """Normalize (samples, channels, ...) and update the running statistics."""
    if not norm.training:
        outputs: Tensor = type(norm).forward(norm, inputs)
        return outputs
    dims = [axis for axis in range(inputs.dim()) if axis != 1]
    shape = [1, -1, *[1] * (inputs.dim() - 2)]
    values = inputs.float()
    count = values.new_full((1,), values.numel() / values.shape[1])
    sums = _sum(torch.cat([values.sum(dims), count]), shard)
    mean, count = sums[:-1] / sums[-1], sums[-1].detach()
    centered = values - mean.view(shape)
    variance = _sum(centered.square().sum(dims), shard) / count
    _update(norm, mean.detach(), variance.detach() * count / (count - 1))
    normalized = centered * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.affine:
        normalized = normalized * norm.weight.view(shape) + norm.bias.view(shape)
    return normalized.to(inputs.dtype)


@torch.no_grad()
def _update(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics with those of a batch, as torch's layers do."""
    if norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None  # noqa: S101 - it comes with the others
    norm.num_batches_tracked.add_(1)
    weight = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), weight)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), weight)


def _sum(values: Tensor, shard: DataShard) -> Tensor:
    total: Tensor = _SumOverShards.apply(values, shard)  # type: ignore[no-untyped-call]
    return total


class _SumOverShards(torch.autograd.Function):
    """The sum over the ranks with other samples; its gradient is summed over them too."""

    @staticmethod
    def forward(context: Any, values: Tensor, shard: DataShard) -> Tensor:
        """Sum `values` over the shards. Collective."""
        context.shard = shard
        total = values.clone()
        distributed.all_reduce(total, group=shard.group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients over the shards. Collective."""
        total = gradients[0].clone()
        distributed.all_reduce(total, group=context.shard.group)
        return total, None
