"""ZeRO stage 1: DDP, with the optimizer's state divided up by whole parameters.

Each rank keeps the state of some parameters, updates these, and sends them to the others. With
AdamW, whose state is twice the size of the model, this is most of the memory that DDP wastes.
https://docs.pytorch.org/docs/stable/distributed.optim.html
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from trainer.strategies.ddp import DDP
from trainer.strategies.single import MakeOptimizer


class Zero1(DDP):
    def prepare(self, model: nn.Sequential, make_optimizer: MakeOptimizer) -> None:
        super().prepare(model, partial(ZeroRedundancyOptimizer, optimizer_class=make_optimizer))

    def stateful(self) -> tuple[nn.Module, Optimizer]:
        """A checkpoint takes from each rank the state of its own parameters, by their names."""
        return self.model, self.optimizer.optim
