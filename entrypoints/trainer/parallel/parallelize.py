"""Prepares a model, or a stage of a pipeline, for the ranks of its layout.

In this order: the layers get float8 products, recompute their activations and are compiled, tensor
parallelism shards the layers, and data parallelism shards or replicates what that leaves. Each step
works on the result of the one before it, so any combination is allowed. First weights that are
deferred are made once the shards exist, or before the model is replicated.
"""

from __future__ import annotations

from torch import nn

from trainer.parallel import layers
from trainer.parallel.data_parallel import Replica, replicate
from trainer.setup import Setup


def parallelize(setup: Setup) -> Replica:
    """Build the model, with the same weights on every rank, and prepare it."""
    model = setup.weights.build()
    if setup.context_parallel is not None:
        from trainer.parallel import sequences

        sequences.prepare(model, setup)
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
        from trainer.parallel.recompute import recompute

        recompute(model, names, options.checkpoint_activations)
    if options.compile:
        layers.compile_each(model, names)


def distribute(part: nn.Module, names: list[str], setup: Setup) -> Replica:
    """Share `part` of a model among the ranks that have it; `names` are its layers."""
    if setup.layout.dims.tp > 1:
        from trainer.parallel import tensor_parallel

        tensor_parallel.apply(part, setup)
    if setup.options.sync_batchnorm:
        from trainer.parallel import batch_norm

        batch_norm.synchronize(part, setup.layout.token_shard)
    device, weights = setup.context.device, setup.weights
    if not setup.preset.sharded or setup.options.offload:
        weights.fill(part, device)
    if not weights.pending_in(part):
        part.to(device)
    replica = replicate(part, names, setup)
    weights.fill(part, device)
    weights.load(part)
    return replica
