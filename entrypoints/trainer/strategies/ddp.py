"""DistributedDataParallel: a replica per rank; gradients are averaged in the backward pass."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trainer import comm_timing
from trainer.strategies.data_parallel import DataParallel
from trainer.strategies.single import CreateOptimizer

UNCOMPRESSED_STEPS = 10
"""Steps before PowerSGD starts: the first gradients are the hardest to compress. torch's default
is 1000, with which a short run would not be compressed at all."""


class DDP(DataParallel):
    """torch's DistributedDataParallel, with optional gradient compression."""

    def check(self) -> None:
        """Raise ValueError for bf16 compression on CPUs and a static graph with micro-batches."""
        compress, device = self.options.compress, self.context.device.type
        if compress == "bf16" and device != "cuda":
            raise ValueError(
                "--compress bf16 requires GPUs (NCCL 2.10 or later); fp16 works with gloo"
            )
        if self.options.static_graph and self.options.micro_batches > 1:
            raise ValueError(
                "--static-graph requires gradients to be reduced in every backward pass, which "
                "--micro-batches above 1 skips until the last one: use one of the two"
            )

    def prepare(self, model: nn.Sequential, create_optimizer: CreateOptimizer) -> None:
        """Wrap the model in DistributedDataParallel."""
        self.model = self.wrap_layers(model.to(self.context.device))
        self.replica = DistributedDataParallel(
            self.model,
            bucket_cap_mb=self.options.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=self.options.static_graph,
        )
        comm_timing.instrument_ddp(self.replica, self.timer)
        self._register_compression(self.options.compress)
        self.optimizer = create_optimizer(self.model.parameters())

    def _register_compression(self, method: str | None) -> None:
        """Send gradients in 16 bits, or low-rank approximations of them (PowerSGD, lossy)."""
        if method == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=UNCOMPRESSED_STEPS
            )
            self.replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif method:
            hook = getattr(default_hooks, f"{method}_compress_hook")
            self.replica.register_comm_hook(None, hook)

    def set_gradient_sync(self, *, last: bool) -> None:
        """Reduce gradients after the last micro-batch only."""
        if self.replica.require_backward_grad_sync != last:  # a module's attributes are slow to set
            self.replica.require_backward_grad_sync = last

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's scores (batch, ..., classes); evaluation bypasses DDP."""
        with self.autocast():
            scores: Tensor = (self.replica if self.model.training else self.model)(inputs)
        return scores
