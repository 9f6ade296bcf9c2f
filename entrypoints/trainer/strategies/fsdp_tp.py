"""Tensor parallelism inside groups of ranks, and fully_shard across them.

The largest models need both: tensor parallelism over the fast links of a node, where it sends
activations at every layer, and sharding over the network between nodes, where it sends each
parameter twice a step. A rank holds a piece of its slice.
"""

from __future__ import annotations

import argparse

from torch import nn

from trainer.group import Place
from trainer.strategies.fsdp import shard
from trainer.strategies.single import MakeOptimizer
from trainer.strategies.tp import TPWithCopies


class FSDPTP(TPWithCopies):
    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        super().__init__(options, place)
        self.averaged = self.share.of

    def prepare(self, model: nn.Sequential, make_optimizer: MakeOptimizer) -> None:
        self.model = self.sliced(model)
        shard(self.model, self.mesh["dp"], self.options)
        self.optimizer = make_optimizer(self.model.parameters())

    def synchronize(self, *, last: bool) -> None:
        self.model.set_requires_gradient_sync(last)
