"""nn.DataParallel: one process drives all GPUs of one machine.

In each step it copies the model to every GPU, gathers the outputs on the first one and sums the
gradients there, in a single Python process. DDP does the same work with one process per GPU and
sends only gradients, during the backward pass: it is faster even on one machine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError
from trainer.strategies.single import CreateOptimizer, Single
from trainer.task import call

_SLOW = (
    "warning: nn.DataParallel copies the model to every GPU in each step and runs in a single "
    "Python process; --strategy ddp gives the same results faster"
)


class DP(Single):
    """torch's nn.DataParallel, for comparison."""

    def check(self) -> None:
        """Raise ConfigError without GPUs or with several ranks."""
        if self.context.world_size > 1 or not torch.cuda.is_available():
            raise ConfigError(
                "--strategy dp requires one process and a GPU, not "
                f"{self.context.world_size} rank(s) and {torch.cuda.device_count()} GPU(s): "
                "use ddp, which also runs on CPUs and on several machines"
            )

    def prepare(self, model: nn.Module, create_optimizer: CreateOptimizer) -> None:
        """Wrap the model in nn.DataParallel."""
        self.context.log(_SLOW)
        super().prepare(model, create_optimizer)
        self.replicas = nn.DataParallel(self.model)

    def forward(self, inputs: Any) -> Any:
        """The model's outputs, gathered on the first GPU."""
        with self.autocast():
            return call(self.replicas, inputs)
