"""ZeRO stages 2 and 3 by fully_shard: parameters, gradients and optimizer state in equal pieces.

A layer's parameters are gathered just before its forward pass. Stage 3 gives them back after it
and gathers them again for the backward pass; stage 2 keeps them in between, which saves a third
of the traffic for the memory of the whole model's weights. HSDP shards over some ranks, best
those of one node, and averages the gradients of equal pieces over such groups.
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from trainer.group import fitting
from trainer.strategies.averaged import Averaged
from trainer.strategies.single import MakeOptimizer


class Zero3(Averaged):
    reshard = True
    """Whether a layer is given back between its forward and its backward pass."""

    def prepare(self, model: nn.Sequential, make_optimizer: MakeOptimizer) -> None:
        self.model = self.layered(model.to(self.place.device))
        shard(self.model, self.mesh(), self.options, reshard=self.reshard)
        self.optimizer = make_optimizer(self.model.parameters())

    def mesh(self) -> DeviceMesh:
        return self.place.mesh(shard=self.place.world)

    def synchronize(self, *, last: bool) -> None:
        self.model.set_requires_gradient_sync(last)


class Zero2(Zero3):
    reshard = False

    def state(self) -> dict[str, Tensor]:
        """In pieces again, where an evaluation has left the layers whole."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().state()


class HSDP(Zero3):
    @property
    def ranks(self) -> int:
        """The number of ranks that hold one copy of the model together."""
        return self.options.shard_ranks or self.place.ranks_of_node

    def check(self) -> None:
        if self.place.world % self.ranks:
            raise ValueError(
                f"--shard-ranks {self.ranks} does not divide the {self.place.world} ranks: "
                f"use one of {fitting(self.place.world)}"
            )

    def mesh(self) -> DeviceMesh:
        return self.place.mesh(replicate=self.place.world // self.ranks, shard=self.ranks)


def shard(
    model: nn.Sequential,
    mesh: DeviceMesh,
    options: argparse.Namespace,
    *,
    reshard: bool = True,
) -> None:
    """Cut every parameter up over `mesh`, of whose two axes the first is one of copies.

    A layer is gathered and given back as a whole.
    """
    policies = {
        "mesh": mesh,
        "reshard_after_forward": reshard,
        "mp_policy": _precision(options.precision),
        "offload_policy": _offload(mesh.device_type) if options.offload else OffloadPolicy(),
    }
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **policies)
    fully_shard(model, **policies)


def _precision(name: str) -> MixedPrecisionPolicy:
    """In bf16 parameters travel in 16 bits, half the bytes, and gradients in 32, so that their sum
    is exact; what is computed how is left to autocast, as in every other strategy, for the same
    numbers, hence inputs are not cast here.

    Not so in fp16: parameters of 16 bits have gradients of 16 bits, also where autocast computes in
    32 (normalisation, embedding), and there the scaled ones overflow: a step is left out that
    every other strategy takes.
    """
    if name != "bf16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _offload(device: str) -> CPUOffloadPolicy:
    """Pinned memory speeds up copies to a GPU, and cannot be had without one."""
    return CPUOffloadPolicy(pin_memory=device == "cuda")
