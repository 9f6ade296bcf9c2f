"""DistributedDataParallel: a whole copy on every rank, gradients averaged while they are made."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trainer import waiting
from trainer.strategies.averaged import Averaged
from trainer.strategies.single import MakeOptimizer

EXACT_STEPS = 10
"""Before PowerSGD begins: the first gradients are the hardest to compress. torch's own default is
1000, so that a short run compresses nothing."""


class DDP(Averaged):
    def check(self) -> None:
        compress, device = self.options.compress, self.place.device.type
        if compress == "bf16" and device != "cuda":
            raise ValueError(
                "--compress bf16 needs GPUs (NCCL 2.10 or later); fp16 works with gloo"
            )
        if self.options.static_graph and self.options.micro_batches > 1:
            raise ValueError(
                "--static-graph needs gradients synchronised every time, and --micro-batches above "
                "1 leaves that out until the last one: use one of the two"
            )

    def prepare(self, model: nn.Sequential, make_optimizer: MakeOptimizer) -> None:
        self.model = self.layered(model.to(self.place.device))
        self.replica = DistributedDataParallel(
            self.model,
            bucket_cap_mb=self.options.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=self.options.static_graph,
        )
        waiting.watch(self.replica, self.clock)
        self._compress(self.options.compress)
        self.optimizer = make_optimizer(self.model.parameters())

    def _compress(self, how: str | None) -> None:
        """Send less than the gradients: rounded to 16 bits, or (lossy) their principal parts."""
        if how == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=EXACT_STEPS
            )
            self.replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif how:
            hook = getattr(default_hooks, f"{how}_compress_hook")
            self.replica.register_comm_hook(None, hook)

    def synchronize(self, *, last: bool) -> None:
        if self.replica.require_backward_grad_sync != last:  # a module's attributes are slow to set
            self.replica.require_backward_grad_sync = last

    def forward(self, inputs: Tensor) -> Tensor:
        with self.autocast():
            return (self.replica if self.model.training else self.model)(inputs)
