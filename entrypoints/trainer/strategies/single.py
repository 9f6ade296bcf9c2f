"""Training in one process; the base class of all strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer import comm_timing, data, gradients, layers, optimizers
from trainer.data import SEED_STEP, Batch, DataShard
from trainer.errors import ConfigError
from trainer.process_group import DistributedContext
from trainer.task import Task, call
from trainer.timing import StepTimer
from trainer.train_options import TrainOptions

CreateOptimizer = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer of parameters, or of groups of them."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Single:
    """The interface between a strategy and the training loop, implemented for one process.

    Attributes that other strategies change:

    * `data_shard`: the samples of a global batch that this rank works on.
    * `averaging_ranks`: the number of ranks over which gradients are averaged. The loss is
      multiplied by it, because it is a mean over the global batch already.
    * `contributes_loss`: whether this rank's loss and hits enter the sums over all ranks. Of ranks
      that work on the same samples, one does.

    `task` and `sample`, a batch of this rank for measurements, are set before `prepare`. `timer`
    times the sections of a step.
    """

    averaging_ranks = 1
    contributes_loss = True
    task: Task
    sample: Batch
    model: nn.Module
    optimizer: Optimizer

    def __init__(self, options: TrainOptions, context: DistributedContext) -> None:
        self.options = options
        self.context = context
        self.data_shard = DataShard(0, 1)
        self.timer = StepTimer(context.device)
        comm_timing.instrument(self.timer)
        self.check()

    def check(self) -> None:
        """Raise ConfigError if options or ranks do not fit this strategy."""
        if self.context.world_size > 1:
            raise ConfigError(
                f"--strategy single is for one process, not {self.context.world_size} ranks: "
                "choose another strategy, such as ddp, or start one process"
            )

    def prepare(self, model: nn.Module, create_optimizer: CreateOptimizer) -> None:
        """Take the model, which has the same weights on every rank, and parallelize it."""
        self.model = self.wrap_layers(model.to(self.context.device))
        self.optimizer = self.make_optimizer(create_optimizer)

    def make_optimizer(self, create: CreateOptimizer) -> Optimizer:
        """The optimizer of the model's trainable parameters. Raises ConfigError if it has none."""
        return create(optimizers.groups(self.model.parameters()))

    def wrap_layers(self, model: nn.Module) -> nn.Module:
        """Apply activation checkpointing and torch.compile to each layer, in place."""
        self.layers = layers.names(model, self.task.layers)
        if self.options.checkpoint_activations:
            layers.recompute(model, self.layers)
        if self.options.compile:
            layers.compile_each(model, self.layers)
        return model

    def forward(self, inputs: Any) -> Any:
        """The model's outputs, or None if another rank has them."""
        with self.autocast():
            return call(self.model, inputs)

    def backward(self, batch: Batch, loss_scale: float = 1.0) -> Tensor:
        """Compute the gradients of the mean loss over the global batch, times `loss_scale`.

        Returns this rank's part of the mean loss, unscaled, as a scalar tensor.
        """
        losses = []
        micro_batches = self.micro_batches(batch)
        for number, micro_batch in enumerate(micro_batches):
            self.set_gradient_sync(last=number + 1 == len(micro_batches))
            with self.timer("forward"):
                loss = self.loss(self.forward(micro_batch.inputs), micro_batch)
            with self.timer("backward"):
                torch.autograd.backward(loss * (self.averaging_ranks * loss_scale))
            losses.append(loss.detach())
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Split `batch` into as many micro-batches as the options say."""
        return data.split(batch, self.options.micro_batches, self.task)

    def seed_step(self, step: int) -> None:
        """Seed the random numbers of a step, such as those of dropout.

        They follow from seed, step and data shard alone: a resumed run draws the same ones, and
        ranks with different samples draw different ones. torch's generator on the CPU takes 32 bits
        of a seed, so each part is spread over them.
        """
        torch.manual_seed((self.options.seed * SEED_STEP + step) * SEED_STEP + self.random_stream)

    @property
    def random_stream(self) -> int:
        """Ranks with the same number draw the same random numbers."""
        return self.data_shard.index

    def set_gradient_sync(self, *, last: bool) -> None:
        """Called before each micro-batch: gradients need to be reduced after the last one only."""

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The sum of the losses in this batch, divided by the number of targets of all ranks.

        The result is a scalar. The parts of all ranks add up to the exact mean, however unequal
        they are. Summed in double precision: in single precision, rounding of the sum would be half
        of the difference between two strategies.
        """
        with self.autocast():
            loss = self.task.loss(outputs, batch.targets)
            count = batch.count
            whole = loss.sum(dtype=torch.float64) if loss.dim() else loss.double() * count
            if isinstance(count, int) and count:
                return whole / batch.total
            counts = torch.as_tensor(count, device=loss.device) > 0
            return torch.where(counts, whole, 0.0) / batch.total  # a mean over nothing is NaN

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass: autocast to 16 bits, or nothing for fp32."""
        if self.options.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.context.device.type, _HALF_DTYPES[self.options.precision])

    def gradient_norm(self) -> Tensor:
        """The 2-norm of the whole model's gradient, a scalar equal on every rank. Collective."""
        return gradients.norm(self.model.parameters(), self.model_parallel_groups)

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Average buffers, such as the statistics of batch normalization, over the data shards.

        Each shard has its own while training; evaluation and checkpoints have the mean. Collective.
        """
        shards = self.data_shard.num_shards
        for buffer in self.model.buffers() if shards > 1 else ():
            if buffer.is_floating_point() and not isinstance(buffer, DTensor):
                distributed.all_reduce(buffer, group=self.data_shard.group)
                buffer.div_(shards)

    @property
    def model_parallel_groups(self) -> Sequence[ProcessGroup]:
        """Groups whose ranks hold different parameters that are not DTensors."""
        return ()

    def step(self) -> None:
        """Update the parameters and clear the gradients."""
        with self.timer("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """The tensors of model and optimizer, under names that all strategies share.

        Sharded tensors are DTensors, so DCP can load them with another number of ranks.
        """
        optimizers.complete_state(self.stateful_objects()[1])
        model, optimizer = self._state_dicts()
        tensors = {f"model.{name}": value for name, value in model.items()}
        tensors |= {f"optimizer.{name}": value for name, value in optimizer.items()}
        return {name: value for name, value in tensors.items() if isinstance(value, Tensor)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned after a checkpoint has been read into it."""
        model, optimizer = self._state_dicts()
        model |= _with_prefix(state, "model.")
        optimizer |= _with_prefix(state, "optimizer.")
        set_state_dict(
            *self.stateful_objects(),
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=_FLAT,
        )

    def _state_dicts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer = get_state_dict(*self.stateful_objects(), options=_FLAT)
        return model, dict(optimizer)

    def extra_metrics(self) -> dict[str, float]:
        """Metrics of this strategy for a logged step. Collective."""
        return {}

    def summary(self) -> str:
        """A line to log at the end of a run, or ''. Collective."""
        return ""

    def stateful_objects(self) -> tuple[nn.Module, Optimizer]:
        """The module and the optimizer whose state this rank saves."""
        return self.model, self.optimizer


def _with_prefix(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries whose names start with `prefix`, without it."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
