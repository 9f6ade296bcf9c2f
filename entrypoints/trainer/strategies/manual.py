"""DDP written out: after the backward pass, all-reduce every gradient.

Read it to understand DDP, but use DDP: it sends the gradients of a layer while those of earlier
layers are still being computed.
"""

from __future__ import annotations

from torch import Tensor, distributed, nn

from trainer.data import Batch
from trainer.strategies.data_parallel import DataParallel
from trainer.strategies.single import CreateOptimizer


class ManualDDP(DataParallel):
    """Data parallelism with one all-reduce per parameter."""

    def prepare(self, model: nn.Module, create_optimizer: CreateOptimizer) -> None:
        """Broadcast rank 0's weights to all ranks."""
        super().prepare(model, create_optimizer)
        for parameter in self.model.parameters():
            distributed.broadcast(parameter.data, src=0)

    def backward(self, batch: Batch, loss_scale: float = 1.0) -> Tensor:
        """Compute this rank's gradients, then average them over the ranks."""
        loss = super().backward(batch, loss_scale)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= self.context.world_size
        return loss
