"""Tensor parallelism: every rank works on the same samples with a slice of each large layer.

Of two linear layers in a row the first is cut by outputs and the second by inputs, so that one sum
over the ranks makes good for both. With sequence parallelism what lies between (normalisation,
additions) is cut along the sequence, and the sum becomes a reduce-scatter and an all-gather: as
much traffic, less memory.
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.data import Batch, Share
from trainer.group import Place, fitting
from trainer.strategies.single import MakeOptimizer, Single

HIDDEN = 64
"""Width of the one wide layer of the digits' model."""


class TP(Single):
    """All ranks share one copy of the model."""

    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        super().__init__(options, place)
        self.mesh = place.mesh(dp=place.world // self.slices, tp=self.slices)
        self.share = Share(self.mesh["dp"].get_local_rank(), self.mesh["dp"].size())
        self.counts = self.mesh["tp"].get_local_rank() == 0

    @property
    def slices(self) -> int:
        """The number of ranks that share one copy of the model."""
        return self.options.tensor_parallel or self.place.world

    def check(self) -> None:
        problems = [*misfits(self.options, self.slices), *self.misplaced()]
        if problems:
            raise ValueError("; ".join(problems))

    def misplaced(self) -> Iterator[str]:
        """What is wrong with the number of ranks."""
        if self.slices != self.place.world:
            yield (
                f"--strategy tp is one copy of the model on all {self.place.world} ranks, not on "
                f"--tensor-parallel {self.slices}: leave that out, or choose tp-dp or fsdp-tp"
            )

    def prepare(self, model: nn.Sequential, make_optimizer: MakeOptimizer) -> None:
        self.model = self.sliced(model)
        self.optimizer = make_optimizer(self.model.parameters())

    def sliced(self, model: nn.Sequential) -> nn.Sequential:
        plan = PLANS[self.options.task](self.options)
        parallelize_module(model.to(self.place.device), self.mesh["tp"], plan)
        return self.layered(model)

    def backward(self, batch: Batch, scale: float = 1.0) -> Tensor:
        loss = super().backward(batch, scale)
        self.complete()
        return loss

    def complete(self) -> None:
        """Make up the sums that are still due, of gradients that came from pieces of a sequence."""
        for parameter in self.model.parameters():
            if parameter.grad.placements != parameter.placements:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


class TPWithCopies(TP):
    """Several copies of the model, each shared by the ranks of a node unless told otherwise."""

    @property
    def slices(self) -> int:
        return self.options.tensor_parallel or self.place.ranks_of_node

    def misplaced(self) -> Iterator[str]:
        if self.place.world % self.slices:
            yield (
                f"--tensor-parallel {self.slices} does not divide the {self.place.world} ranks: "
                f"use one of {fitting(self.place.world)}"
            )


def misfits(options: argparse.Namespace, slices: int) -> Iterator[str]:
    """Why the model cannot be cut into so many slices."""
    text = options.task == "text"
    what, size = ("--heads", options.heads) if text else ("the hidden layer of", HIDDEN)
    if size % slices:
        yield (
            f"{what} {size} cannot be cut into {slices} equal slices, only into {fitting(size)}: "
            "start so many ranks, or name one with --tensor-parallel (tp-dp and fsdp-tp)"
        )
    if options.sequence_parallel and not text:
        yield "--sequence-parallel needs a sequence: choose --task text, or leave it out"
    elif options.sequence_parallel and options.sequence % slices:
        longer = math.ceil(options.sequence / slices) * slices
        yield (
            f"--sequence-parallel cuts --sequence {options.sequence} into {slices} equal pieces: "
            f"choose --sequence {longer}"
        )


class Whole(ParallelStyle):
    """A layer of which every rank has all and computes the same.

    Its parameters are DTensors like all others, since optimizers and norms that work on many
    tensors at once refuse a mixture.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=self._into, output_fn=self._out_of)

    @staticmethod
    def _into(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
        return tuple(
            DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in inputs
        )

    @staticmethod
    def _out_of(_module: nn.Module, outputs: DTensor, _mesh: DeviceMesh) -> Tensor:
        return outputs.to_local()


def _digits(_options: argparse.Namespace) -> dict[str, ParallelStyle]:
    return {
        "conv*": Whole(),
        "hidden": ColwiseParallel(),
        "scores": RowwiseParallel(),
    }


def _text(options: argparse.Namespace) -> dict[str, ParallelStyle]:
    """`between` the linear layers every rank has all, or its part of the sequence."""
    between = Shard(1) if options.sequence_parallel else Replicate()
    gather = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    norm = SequenceParallel() if options.sequence_parallel else Whole()
    return {
        "embed.byte": RowwiseParallel(input_layouts=Replicate()),
        "embed.position": Whole(),
        "embed": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=between),
        "block*.norm1": norm,
        "block*.attention": gather,
        "block*.attention.query": ColwiseParallel(),
        "block*.attention.key": ColwiseParallel(),
        "block*.attention.value": ColwiseParallel(),
        "block*.attention.out": RowwiseParallel(output_layouts=between),
        "block*.norm2": norm,
        "block*.feed": gather,
        "block*.feed.up": ColwiseParallel(),
        "block*.feed.down": RowwiseParallel(output_layouts=between),
        "head.norm": norm,
        "head.scores": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }


PLANS = {"digits": _digits, "text": _text}
