"""Tensor parallelism: all ranks work on the same samples, each with a slice of every large layer.

Of two consecutive linear layers, the first is sharded by outputs and the second by inputs, so that
one all-reduce serves both. With sequence parallelism, what lies between (normalization, residual
additions) is sharded along the sequence, and the all-reduce becomes a reduce-scatter and an
all-gather: the same traffic, less memory.
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

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

from trainer.data import Batch, DataShard
from trainer.errors import ConfigError
from trainer.process_group import DistributedContext, divisors
from trainer.strategies.single import CreateOptimizer, Single
from trainer.train_options import TrainOptions

HIDDEN_SIZE = 64
"""Outputs of the layer `hidden` of the digits model, the only one that is sharded."""


class TP(Single):
    """All ranks share one copy of the model."""

    def __init__(self, options: TrainOptions, context: DistributedContext) -> None:
        super().__init__(options, context)
        size = self.tensor_parallel_size
        self.mesh = context.mesh(dp=context.world_size // size, tp=size)
        copies = self.mesh["dp"]
        self.data_shard = DataShard(copies.get_local_rank(), copies.size(), copies.get_group())
        self.contributes_loss = self.mesh["tp"].get_local_rank() == 0

    @property
    def tensor_parallel_size(self) -> int:
        """The number of ranks that share one copy of the model."""
        return self.options.tensor_parallel or self.context.world_size

    def check(self) -> None:
        """Raise ConfigError, with all problems, if model and ranks do not fit."""
        problems = [
            *_model_problems(self.options, self.tensor_parallel_size),
            *self.world_size_problems(),
        ]
        if problems:
            raise ConfigError("; ".join(problems))

    def world_size_problems(self) -> Iterator[str]:
        """Problems with the number of ranks."""
        size, world_size = self.tensor_parallel_size, self.context.world_size
        if size != world_size:
            yield (
                f"--strategy tp shares one model among all {world_size} ranks, which contradicts "
                f"--tensor-parallel {size}: remove that option, or choose tp-dp or fsdp-tp"
            )

    def prepare(self, model: nn.Module, create_optimizer: CreateOptimizer) -> None:
        """Shard the layers according to the plan of the task."""
        self.model = self.parallelize(model)
        self.optimizer = self.make_optimizer(create_optimizer)

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Apply the plan and wrap the layers, in place."""
        plan = self._plan(model)
        parallelize_module(model.to(self.context.device), self.mesh["tp"], plan)
        return self.wrap_layers(model)

    def _plan(self, model: nn.Module) -> dict[str, ParallelStyle]:
        """The plan of the task, or of the model itself. Raises ConfigError if there is none."""
        if own := _PLANS.get(self.options.task):
            return own(self.options)
        if self.task.tensor_parallel is not None:
            return dict(self.task.tensor_parallel(model))
        return _plan_of_hugging_face(model, self.tensor_parallel_size)

    def backward(self, batch: Batch, loss_scale: float = 1.0) -> Tensor:
        """Compute the gradients; see `Single.backward`."""
        loss = super().backward(batch, loss_scale)
        self.finish_gradients()
        return loss

    def finish_gradients(self) -> None:
        """Reduce gradients that are still partial sums, of layers sharded along the sequence."""
        for parameter in self.model.parameters():
            gradient, data = parameter.grad, parameter.data
            if not isinstance(gradient, DTensor) or not isinstance(data, DTensor):
                continue  # unused, frozen, or not in the plan: the same on all ranks
            if gradient.placements != data.placements:
                parameter.grad = gradient.redistribute(placements=data.placements)


class TPWithDataParallel(TP):
    """Several copies of the model, each shared by the ranks of a node by default."""

    @property
    def tensor_parallel_size(self) -> int:
        """The number of ranks that share one copy of the model."""
        return self.options.tensor_parallel or self.context.local_world_size

    def world_size_problems(self) -> Iterator[str]:
        """Problems with the number of ranks."""
        size, world_size = self.tensor_parallel_size, self.context.world_size
        if world_size % size:
            yield (
                f"--tensor-parallel {size} does not divide the {world_size} ranks: "
                f"use one of {divisors(world_size)}"
            )


def _model_problems(options: TrainOptions, ranks: int) -> Iterator[str]:
    """Why the model cannot be sharded over so many ranks."""
    if options.task not in _PLANS:
        if options.sequence_parallel:
            yield "--sequence-parallel: put it into the plan of your task, Task.tensor_parallel"
        return
    text = options.task == "text"
    what, size = ("--heads", options.heads) if text else ("the hidden size", HIDDEN_SIZE)
    if size % ranks:
        yield (
            f"{what} {size} cannot be divided by {ranks} ranks, only by {divisors(size)}: start "
            "that many ranks, or set --tensor-parallel (tp-dp and fsdp-tp)"
        )
    if options.sequence_parallel and not text:
        yield "--sequence-parallel requires a sequence: choose --task text, or remove the option"
    elif options.sequence_parallel and options.sequence % ranks:
        longer = math.ceil(options.sequence / ranks) * ranks
        yield (
            f"--sequence-parallel requires --sequence {options.sequence} to be a multiple of the "
            f"{ranks} ranks: choose --sequence {longer}"
        )


class ReplicatedLayer(ParallelStyle):
    """A layer that every rank holds and computes in full.

    Its parameters are DTensors like all others, because optimizers and norms that process many
    tensors at once refuse a mixture.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        to_tensor: Any = self._to_tensor  # torch uses its result, unlike its annotation says
        return distribute_module(
            module, device_mesh, input_fn=self._to_dtensor, output_fn=to_tensor
        )

    @staticmethod
    def _to_dtensor(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
        return tuple(
            DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in inputs
        )

    @staticmethod
    def _to_tensor(_module: nn.Module, outputs: DTensor, _mesh: DeviceMesh) -> Tensor:
        return outputs.to_local()


def _digits_plan(_options: TrainOptions) -> dict[str, ParallelStyle]:
    return {
        "conv*": ReplicatedLayer(),
        "hidden": ColwiseParallel(),
        "scores": RowwiseParallel(),
    }


def _text_plan(options: TrainOptions) -> dict[str, ParallelStyle]:
    """`between` attention and MLP, hidden states are replicated or sharded along the sequence."""
    between = Shard(1) if options.sequence_parallel else Replicate()
    gather = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    norm = SequenceParallel() if options.sequence_parallel else ReplicatedLayer()
    return {
        "embed.byte": RowwiseParallel(input_layouts=Replicate()),
        "embed.position": ReplicatedLayer(),
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


_STYLES = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
}
"""The words of `base_model_tp_plan` in transformers; other layers stay whole on each rank."""


def _plan_of_hugging_face(model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """The plan that a model of transformers brings. Raises ConfigError if it does not fit."""
    words: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    plan = {name: _STYLES[word] for name, word in words.items() if word in _STYLES}
    if not plan:
        raise ConfigError(
            f"{type(model).__name__} has no plan for tensor parallelism: give Task.tensor_parallel "
            "one for `parallelize_module`, or choose another strategy, such as fsdp"
        )
    config: Any = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or ranks
        if heads % ranks:
            raise ConfigError(
                f"{name} {heads} of {type(model).__name__} cannot be divided by {ranks} ranks, "
                f"only by {divisors(heads)}"
            )
    return plan


_PLANS = {"digits": _digits_plan, "text": _text_plan}
