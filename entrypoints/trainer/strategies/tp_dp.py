"""Tensor parallelism inside groups of ranks, and the same copy of the model in each group.

Ranks that hold the same slice add their gradients up, as DDP does, while the backward pass goes
on. DistributedDataParallel itself cannot be used here: it puts new tensors in the place of sliced
parameters at every forward pass (torch 2.13), so that neither a checkpoint nor the norm of the
gradient nor a recomputed activation finds those that the optimizer has.
"""

from __future__ import annotations

from torch import distributed, nn

from trainer.strategies.single import MakeOptimizer
from trainer.strategies.tp import TPWithCopies


class TPDP(TPWithCopies):
    def prepare(self, model: nn.Sequential, make_optimizer: MakeOptimizer) -> None:
        super().prepare(model, make_optimizer)
        self.whole = True
        self.sums: list[distributed.Work] = []
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._add_up)

    def _add_up(self, parameter: nn.Parameter) -> None:
        """Start to sum a gradient over the copies, as soon as it is complete here."""
        if self.whole:
            mine = parameter.grad.to_local()
            group = self.mesh.get_group("dp")
            self.sums.append(distributed.all_reduce(mine, group=group, async_op=True))

    def synchronize(self, *, last: bool) -> None:
        self.whole = last

    def complete(self) -> None:
        for work in self.sums:
            work.wait()
        self.sums.clear()
        super().complete()
