"""Tensor parallelism within groups of ranks, and fully_shard across them.

The largest models need both. Tensor parallelism, which communicates activations in every layer,
uses the fast links within a node. Sharding, which communicates each parameter twice per step, uses
the network between nodes. Each rank holds a shard of its tensor-parallel slice.
"""

from __future__ import annotations

from torch import nn

from trainer.process_group import DistributedContext
from trainer.strategies.fsdp import set_requires_gradient_sync, shard
from trainer.strategies.single import CreateOptimizer
from trainer.strategies.tp import TPWithDataParallel
from trainer.train_options import TrainOptions


class FSDPxTP(TPWithDataParallel):
    """A two-dimensional mesh: fully_shard over "dp", tensor parallelism over "tp"."""

    def __init__(self, options: TrainOptions, context: DistributedContext) -> None:
        super().__init__(options, context)
        self.averaging_ranks = self.data_shard.num_shards

    def prepare(self, model: nn.Module, create_optimizer: CreateOptimizer) -> None:
        """Apply tensor parallelism, then shard."""
        self.model = shard(self.parallelize(model), self.layers, self.mesh["dp"], self.options)
        self.optimizer = self.make_optimizer(create_optimizer)

    def set_gradient_sync(self, *, last: bool) -> None:
        """Reduce gradients after the last micro-batch only."""
        set_requires_gradient_sync(self.model, last=last)
