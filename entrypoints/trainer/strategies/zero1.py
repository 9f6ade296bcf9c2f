"""ZeRO stage 1: DDP, with the optimizer state divided among the ranks by whole parameters.

Each rank keeps the state of some parameters, updates those, and broadcasts them. With AdamW, whose
state is twice the size of the model, this saves most of the memory that DDP duplicates.
https://docs.pytorch.org/docs/stable/distributed.optim.html
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from trainer.strategies.ddp import DDP
from trainer.strategies.single import CreateOptimizer


class Zero1(DDP):
    """torch's ZeroRedundancyOptimizer on top of DDP."""

    def prepare(self, model: nn.Module, create_optimizer: CreateOptimizer) -> None:
        """Wrap the model in DDP and the optimizer in ZeroRedundancyOptimizer."""
        optimizer_class: Any = create_optimizer  # any callable of parameters works
        super().prepare(model, partial(ZeroRedundancyOptimizer, optimizer_class=optimizer_class))

    def stateful_objects(self) -> tuple[nn.Module, Optimizer]:
        """The model and the local optimizer: each rank saves the state of its own parameters."""
        assert isinstance(self.optimizer, ZeroRedundancyOptimizer)  # noqa: S101 - see `prepare`
        return self.model, self.optimizer.optim
