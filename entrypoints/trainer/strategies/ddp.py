"""DistributedDataParallel: a replica per rank; gradients are averaged in the backward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trainer import comm_timing, probe
from trainer.errors import ConfigError
from trainer.process_group import sum_over_ranks
from trainer.strategies.data_parallel import DataParallel
from trainer.strategies.single import CreateOptimizer
from trainer.task import call

UNCOMPRESSED_STEPS = 10
"""Steps before PowerSGD starts: the first gradients are the hardest to compress. torch's default
is 1000, with which a short run would not be compressed at all."""


class DDP(DataParallel):
    """torch's DistributedDataParallel, with optional gradient compression."""

    def check(self) -> None:
        """Raise ConfigError for bf16 compression on CPUs and a static graph with micro-batches."""
        compress, device = self.options.compress, self.context.device.type
        if compress == "bf16" and device != "cuda":
            raise ConfigError(
                "--compress bf16 requires GPUs (NCCL 2.10 or later); fp16 works with gloo"
            )
        if self.options.static_graph and self.options.micro_batches > 1:
            raise ConfigError(
                "--static-graph requires gradients to be reduced in every backward pass, which "
                "--micro-batches above 1 skips until the last one: use one of the two"
            )

    def prepare(self, model: nn.Module, create_optimizer: CreateOptimizer) -> None:
        """Wrap the model in DistributedDataParallel."""
        self.model = self.wrap_layers(model.to(self.context.device))
        self.replica = DistributedDataParallel(
            self.model,
            bucket_cap_mb=self.options.bucket_mb,
            find_unused_parameters=self._has_unused_parameters(),
            gradient_as_bucket_view=True,
            static_graph=self.options.static_graph,
        )
        self.replica.broadcast_buffers = False  # see `average_buffers`
        comm_timing.instrument_ddp(self.replica, self.timer)
        self._register_compression(self.options.compress)
        self.optimizer = self.make_optimizer(create_optimizer)

    def _has_unused_parameters(self) -> bool:
        """Whether a parameter gets no gradient on any rank; DDP would wait for it. Collective."""
        model, device = self.model, self.context.device

        def loss() -> Tensor:
            return self.loss(super(DDP, self).forward(self.sample.inputs), self.sample)

        unused = probe.has_unused_parameters(model, device, loss)
        return any(sum_over_ranks(self.context, [unused]))

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

    def forward(self, inputs: Any) -> Any:
        """The model's outputs; evaluation bypasses DDP."""
        with self.autocast():
            return call(self.replica if self.model.training else self.model, inputs)
