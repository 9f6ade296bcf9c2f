"""Prepares a model, or a stage of a pipeline, for the ranks of its layout.

In this order: the layers get float8 products, recompute their activations and are compiled, tensor
parallelism shards the layers, and data parallelism shards or replicates what that leaves. Each step
works on the result of the one before it, so any combination is allowed. First weights that are
deferred are made once the shards exist, or before the model is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainer.data import DataShard
from trainer.parallel import layers
from trainer.parallel.data_parallel import Replica, replicate
from trainer.setup import Setup

_aten: Any = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default}
_KEPT = {
    _aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 - torch's names of operators
    _aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
    _aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
    _aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
}
"""Attention costs more than it stores."""
_COLLECTIVES = ("_c10d_functional::", "c10d_functional::")
"""Namespaces of operators: what has been received is not sent again."""


def parallelize(setup: Setup) -> Replica:
    """Build the model, with the same weights on every rank, and prepare it."""
    model = setup.weights.build()
    if setup.context_parallel is not None:
        setup.context_parallel.prepare(model, setup.sample)
    prepare_layers(model, setup)
    return distribute(model, layers.names(model, setup.task.layers), setup)


def prepare_layers(model: nn.Module, setup: Setup) -> None:
    """Apply float8, activation checkpointing and torch.compile to each layer, in place."""
    options, names = setup.options, layers.names(model, setup.task.layers)
    if options.precision == "float8":
        from trainer.optim import float8

        float8.convert(model, names, setup.context.device)
    if options.checkpoint_activations:
        if setup.context_parallel is not None:
            setup.context_parallel.cover(model, names)
        recompute(model, names, options.checkpoint_activations)
    if options.compile:
        for name in names:
            model.get_submodule(name).compile()


def distribute(part: nn.Module, names: list[str], setup: Setup) -> Replica:
    """Share `part` of a model among the ranks that have it; `names` are its layers."""
    if setup.layout.dims.tp > 1:
        from trainer.parallel import tensor_parallel

        tensor_parallel.apply(part, setup)
    if setup.options.sync_batchnorm:
        synchronize_batch_norm(part, setup.layout.token_shard)
    device, weights = setup.context.device, setup.weights
    if not setup.preset.sharded or setup.options.offload:
        weights.fill(part, device)
    if not weights.pending_in(part):
        part.to(device)
    replica = replicate(part, names, setup)
    weights.fill(part, device)
    weights.load(part)
    return replica


def recompute(model: nn.Module, layers: Sequence[str], how: str) -> None:
    """Recompute the activations of these layers, in place; `how` is "full" or "selective".

    The names of parameters stay as they are. Selective recomputation keeps the results of
    attention, of collectives and of every second matrix product.
    """
    options: dict[str, Any] = {}
    if how == "selective":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(_Policy())
    for name in layers:
        layer: Any = model.get_submodule(name)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


class _Policy:
    """Decides for each operator whether its result is kept; counts the products of both passes."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Callable[..., Any], *_: Any, **__: Any) -> Any:
        if operator in _PRODUCTS:
            self._products[context.is_recompute] += 1
            keep = self._products[context.is_recompute] % 2 == 1
        else:
            keep = operator in _KEPT or str(operator).startswith(_COLLECTIVES)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def synchronize_batch_norm(model: nn.Module, shard: DataShard) -> None:
    """Let the batch normalization of `model` use the samples of all data shards, in place.

    Statistics are those of a micro-batch of all ranks: with one micro-batch, of the global batch.
    """
    if shard.num_shards == 1:
        return
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not hasattr(module, "hollow"):
            layer: Any = module
            layer.forward = partial(_normalize, module, shard)


def _normalize(norm: _BatchNorm, shard: DataShard, inputs: Tensor) -> Tensor:
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
    _update_statistics(norm, mean.detach(), variance.detach() * count / (count - 1))
    normalized = centered * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.affine:
        normalized = normalized * norm.weight.view(shape) + norm.bias.view(shape)
    return normalized.to(inputs.dtype)


@torch.no_grad()
def _update_statistics(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
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
