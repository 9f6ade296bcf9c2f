"""Tensor parallelism within groups of ranks, and data parallelism across them.

Ranks that hold the same slice sum their gradients during the backward pass, as DDP does.
DistributedDataParallel itself cannot be used: it replaces sharded parameters by new tensors in
every forward pass (torch 2.13), and then neither checkpoints, nor the gradient norm, nor
recomputed activations find the tensors that the optimizer holds.
"""

from __future__ import annotations

from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from trainer.strategies.single import CreateOptimizer
from trainer.strategies.tp import TPWithDataParallel


class TPxDP(TPWithDataParallel):
    """A two-dimensional mesh: all-reduce over "dp", tensor parallelism over "tp"."""

    def prepare(self, model: nn.Module, create_optimizer: CreateOptimizer) -> None:
        """Shard the layers and register the hooks that reduce gradients."""
        super().prepare(model, create_optimizer)
        self._sync = True
        self._reductions: list[distributed.Work] = []
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._start_reduction)

    def _start_reduction(self, parameter: Tensor) -> None:
        """Start to sum a gradient over the copies as soon as it is computed here."""
        if self._sync and parameter.grad is not None:
            gradient, group = parameter.grad, self.mesh.get_group("dp")
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            work = distributed.all_reduce(local, group=group, async_op=True)
            assert work is not None  # noqa: S101 - async_op
            self._reductions.append(work)

    def set_gradient_sync(self, *, last: bool) -> None:
        """Reduce gradients after the last micro-batch only."""
        self._sync = last

    def finish_gradients(self) -> None:
        """Wait for the reductions, then for those within the copies."""
        for work in self._reductions:
            work.wait()
        self._reductions.clear()
        super().finish_gradients()
