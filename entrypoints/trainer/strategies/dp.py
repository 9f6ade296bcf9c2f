"""nn.DataParallel: one process drives all GPUs of one machine.

Each step it copies the model to every GPU, gathers the outputs on the first and adds the
gradients up there, all by one Python process. DDP does the same work with one process a GPU,
sends gradients only, and while they are made: it is faster even on one machine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.strategies.single import MakeOptimizer, Single

BETTER = (
    "warning: nn.DataParallel copies the model to every GPU at each step and works in a single "
    "Python process; --strategy ddp gives the same numbers faster"
)


class DP(Single):
    def check(self) -> None:
        if self.place.world > 1 or not torch.cuda.is_available():
            raise ValueError(
                f"--strategy dp is one process that drives the GPUs of one machine; here are "
                f"{self.place.world} rank(s) and {torch.cuda.device_count()} GPU(s): "
                "use ddp, which also runs on CPUs and several machines"
            )

    def prepare(self, model: nn.Sequential, make_optimizer: MakeOptimizer) -> None:
        self.place.say(BETTER)
        super().prepare(model, make_optimizer)
        self.replicas = nn.DataParallel(self.model)

    def forward(self, inputs: Tensor) -> Tensor:
        with self.autocast():
            return self.replicas(inputs)
