"""ZeRO stages 2 and 3 with fully_shard: parameters, gradients and optimizer state are sharded.

The parameters of a layer are gathered just before its forward pass. Stage 3 frees them afterwards
and gathers them again for the backward pass. Stage 2 keeps them, which saves a third of the traffic
at the cost of memory for all weights. HSDP shards within groups of ranks, ideally those of a node,
and averages the gradients over the groups.
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Sequence

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

from trainer.errors import ConfigError
from trainer.process_group import divisors
from trainer.strategies.data_parallel import DataParallel
from trainer.strategies.single import CreateOptimizer
from trainer.train_options import TrainOptions


class Zero3(DataParallel):
    """fully_shard over all ranks."""

    reshard_after_forward = True
    """Whether a layer's parameters are freed between its forward and its backward pass."""

    def prepare(self, model: nn.Module, create_optimizer: CreateOptimizer) -> None:
        """Shard each layer and the model."""
        model = self.wrap_layers(model.to(self.context.device))
        self.model = shard(
            model,
            self.layers,
            self.mesh(),
            self.options,
            reshard_after_forward=self.reshard_after_forward,
        )
        self.optimizer = self.make_optimizer(create_optimizer)

    def mesh(self) -> DeviceMesh:
        """The mesh of ranks over which parameters are sharded."""
        return self.context.mesh(shard=self.context.world_size)

    def set_gradient_sync(self, *, last: bool) -> None:
        """Reduce gradients after the last micro-batch only."""
        set_requires_gradient_sync(self.model, last=last)


class Zero2(Zero3):
    """Parameters stay gathered between the forward and the backward pass."""

    reshard_after_forward = False

    def state(self) -> dict[str, Tensor]:
        """The state, after resharding layers that an evaluation has left gathered."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().state()


class HSDP(Zero3):
    """Sharded within groups of ranks, replicated over the groups."""

    @property
    def shard_ranks(self) -> int:
        """The number of ranks that hold one copy of the model together; by default a node's."""
        return self.options.shard_ranks or self.context.local_world_size

    def check(self) -> None:
        """Raise ConfigError if the ranks cannot be divided into groups."""
        if self.context.world_size % self.shard_ranks:
            raise ConfigError(
                f"--shard-ranks {self.shard_ranks} does not divide the "
                f"{self.context.world_size} ranks: use one of {divisors(self.context.world_size)}"
            )

    def mesh(self) -> DeviceMesh:
        """A mesh with the axes replicate and shard."""
        groups = self.context.world_size // self.shard_ranks
        return self.context.mesh(replicate=groups, shard=self.shard_ranks)


def shard(
    model: nn.Module,
    layers: Sequence[str],
    mesh: DeviceMesh,
    options: TrainOptions,
    *,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard all parameters over `mesh`, in place; the first of two axes holds replicas.

    Each of `layers`, names in the model, is gathered and freed as a unit.
    """
    offload = _offload_policy(mesh.device_type) if options.offload else OffloadPolicy()
    for unit in (*map(model.get_submodule, layers), model):
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=_precision_policy(options.precision),
            offload_policy=offload,
        )
    return model


def set_requires_gradient_sync(model: nn.Module, *, last: bool) -> None:
    """Tell a sharded model whether the next backward pass reduces gradients."""
    assert isinstance(model, FSDPModule)  # noqa: S101 - fully_shard has changed its class
    model.set_requires_gradient_sync(last)


def _precision_policy(precision: str) -> MixedPrecisionPolicy:
    """What FSDP communicates in; what computes in which precision is left to autocast.

    In bf16, parameters are gathered in 16 bits, which halves the traffic, and gradients are reduced
    in 32, so that their sum is exact. Inputs are not cast, because autocast does that as in every
    other strategy. In fp16, parameters stay in 32 bits: with 16-bit parameters, gradients would be
    16-bit even where autocast computes in 32 (normalization, embedding), and the scaled ones would
    overflow, so that steps would be skipped that no other strategy skips.
    """
    if precision != "bf16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _offload_policy(device: str) -> CPUOffloadPolicy:
    """Offload to pinned memory, which speeds up copies to a GPU and requires one."""
    return CPUOffloadPolicy(pin_memory=device == "cuda")
