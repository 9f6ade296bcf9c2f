"""What DDP does, written out: after the backward pass, every gradient is averaged over the ranks.

Read it to understand DDP; use DDP, which sends a layer's gradients while earlier layers still
compute theirs.
"""

from __future__ import annotations

from torch import Tensor, distributed, nn

from trainer.data import Batch
from trainer.strategies.averaged import Averaged
from trainer.strategies.single import MakeOptimizer


class Manual(Averaged):
    def prepare(self, model: nn.Sequential, make_optimizer: MakeOptimizer) -> None:
        super().prepare(model, make_optimizer)
        for parameter in self.model.parameters():  # all begin as rank 0 does
            distributed.broadcast(parameter.data, src=0)

    def backward(self, batch: Batch, scale: float = 1.0) -> Tensor:
        loss = super().backward(batch, scale)
        for parameter in self.model.parameters():
            distributed.all_reduce(parameter.grad)
            parameter.grad /= self.place.world
        return loss
