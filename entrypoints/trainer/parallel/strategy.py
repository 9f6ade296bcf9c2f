"""A model in training on the ranks of its layout: what the training loop calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from trainer import data
from trainer.checkpoint import stored_state
from trainer.checkpoint.stored_state import Stored
from trainer.data import Batch
from trainer.errors import ConfigError
from trainer.optim import gradients, optimizers
from trainer.optim.weight_average import WeightAverage
from trainer.parallel import layers, shards
from trainer.parallel.parallelize import parallelize
from trainer.parallel.process_group import sum_over_ranks
from trainer.seeds import mixed, seed_python, seed_torch
from trainer.setup import Setup
from trainer.task import CreateOptimizer

_EVALUATES = (
    "warning: Task.model returned the model in evaluation mode, so it is trained without dropout "
    "and with fixed batch-normalization statistics. `from_pretrained` returns such models: call "
    "`train()` in Task.model unless this is intended"
)
_APART = (
    "warning: a batch's loss is not the mean of its parts' losses weighted by their targets, so "
    "training depends on the number of ranks and micro-batches. If the loss has class weights, "
    "make Task.count return the sum of the targets' weights"
)


class Strategy:
    """Forward and backward passes, gradients, the optimizer's step, and the state to save.

    `model` has the parameters of this rank; the first weights are the same on every rank.
    Collective. Raises ConfigError if the model does not fit the strategy.
    """

    def __init__(self, setup: Setup, create_optimizer: CreateOptimizer) -> None:
        self.setup = setup
        self.objective = setup.objective
        self.timer = setup.timer
        self.pipeline = self.replica = None
        self._checked = False
        if setup.preset.pipeline:
            from trainer.parallel.pipeline import Pipeline

            self.pipeline = Pipeline(setup)
            self.model: nn.Module = self.pipeline.model
        else:
            self.replica = parallelize(setup)
            self.model = self.replica.model
        if setup.weights.evaluates:
            setup.context.log(_EVALUATES)
        if setup.context_parallel is not None:
            setup.context_parallel.check(self.model, setup)
            self._reshard()
        self.optimizer = self._make_optimizer(create_optimizer)
        self._group_settings = optimizers.GroupSettings(self._local_optimizer)
        stored_state.check_extra_state(self.model)
        decay = setup.options.ema
        self._average = WeightAverage(self.model, decay) if decay and self._trains else None

    def _make_optimizer(self, create: CreateOptimizer) -> Optimizer:
        """The optimizer of the trainable parameters; each rank updates some with ZeRO 1.

        ZeRO 1 divides the optimizer state among the ranks by whole parameters. Each rank keeps the
        state of some, updates those, and broadcasts them. With AdamW, whose state is twice the size
        of the model, this saves most of the memory that DDP duplicates.
        https://docs.pytorch.org/docs/stable/distributed.optim.html
        """
        parameters = optimizers.groups(self.model, self.setup.task.optimizer_settings)
        if not any(sum_over_ranks(self.setup.context, [len(parameters)])):
            raise ConfigError(
                "the model has no trainable parameters: requires_grad is False for all"
            )
        self._trains = bool(parameters)
        if not parameters:  # of a stage of a pipeline: torch refuses an optimizer of none
            parameters = [nn.Parameter(torch.zeros((), device=self.setup.context.device))]
        create = self.setup.task.optimizer or create
        if self.setup.preset.data == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer_class: Any = create  # any callable of parameters works
            create = partial(ZeroRedundancyOptimizer, optimizer_class=optimizer_class)
        return create(parameters)

    def forward(self, inputs: Any) -> Any:
        """The whole outputs of a batch in evaluation, or None if another rank has them."""
        if self.pipeline is not None:
            return self.pipeline.forward(inputs)
        return shards.whole(self.objective.outputs(self.model, inputs))

    def part(self, batch: Batch) -> Batch:
        """What this rank computes of its batch: all, or a part of every sequence.

        Raises ValueError if sequences cannot be divided, which ranks with other samples do not see.
        """
        if self.setup.context_parallel is None:
            return batch
        try:
            return self.setup.context_parallel.part(batch)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def backward(self, batch: Batch, loss_scale: float = 1.0) -> Callable[[], Tensor]:
        """Compute the gradients of the mean loss over the global batch, times `loss_scale`.

        Gradients are averaged over the ranks with other samples or positions, and the loss is a
        mean over the global batch already: it is multiplied by their number. The result computes
        this rank's part of the mean loss, unscaled, as a scalar tensor.
        """
        factor = self.setup.layout.dims.dp * self.setup.layout.dims.cp * loss_scale
        with self.objective.sharded_scores():
            if self.pipeline is not None:
                loss = self.pipeline.backward(batch, factor).detach
            else:
                loss = self._accumulate(batch, factor)
        if not self._checked:
            self._check_loss()
        if self.setup.preset.tensor:
            from trainer.parallel import tensor_parallel

            tensor_parallel.finish_gradients(self.model)
        return loss

    def _check_loss(self) -> None:
        """Warn of a loss that depends on how a batch is divided. Collective."""
        self._checked = True
        options, dims = self.setup.options, self.setup.layout.dims
        apart = any(sum_over_ranks(self.setup.context, [not self.objective.adds_up]))
        if apart and dims.dp * dims.cp * options.micro_batches > 1:
            self.setup.context.log(_APART)

    def _accumulate(self, batch: Batch, factor: float) -> Callable[[], Tensor]:
        """Add up the gradients of the micro-batches."""
        assert self.replica is not None  # noqa: S101 - there is no pipeline
        parts = []
        options = self.setup.options
        micro_batches = data.split(batch, options.micro_batches, self.setup.task)
        for number, micro_batch in enumerate(map(self.part, micro_batches), 1):
            last = number == len(micro_batches)
            self.replica.set_gradient_sync(sync=last or options.reduce_each)
            with self.timer("forward"):
                # nothing refers to the outputs, so that they are freed before the backward pass
                losses = self.objective.losses(
                    self.objective.outputs(self.replica.module, micro_batch.inputs), micro_batch
                )
            with self.timer("backward"):
                parts.append(self.objective.backward(losses, micro_batch, factor))
        self.replica.finish_gradients()
        return partial(_sum, parts)

    def seed_step(self, step: int) -> None:
        """Seed the random numbers of a step, such as those of dropout.

        They follow from seed, step and data shard alone: a resumed run draws the same ones, and
        ranks with different samples draw different ones. numpy and Python draw the same on all
        ranks that share samples: with their numbers, models choose layers and masks.
        """
        seed, layout = self.setup.options.seed, self.setup.layout
        common = mixed(3, seed, step, layout.data_shard.index)
        seed_torch(mixed(seed, step, layout.random_stream))
        seed_python(common)
        if self.pipeline is not None:
            self.pipeline.seed(common)

    def gradient_norm(self) -> Tensor:
        """The 2-norm of the whole model's gradient, a scalar equal on every rank. Collective."""
        parameters, device = self.model.parameters(), self.setup.context.device
        stages = () if self.pipeline is None else (self.pipeline.group,)
        return gradients.norm(parameters, device, stages)

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Average buffers, such as the statistics of batch normalization, over the ranks.

        Those with other samples or positions have their own while training; evaluation and
        checkpoints have the mean. Collective.
        """
        shard = self.setup.layout.token_shard
        for buffer in self.model.buffers() if shard.num_shards > 1 else ():
            if buffer.is_floating_point() and not hasattr(buffer, "to_local"):
                distributed.all_reduce(buffer, group=shard.group)
                buffer.div_(shard.num_shards)

    def step(self) -> None:
        """Update the parameters and clear the gradients."""
        with self.timer("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self._average:
                self._average.update()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate in the block: with averaged buffers, and weights if they are. Collective."""
        self.average_buffers()
        stages = self.pipeline.parts if self.pipeline else ()
        with layers.evaluating(self.model, *stages):
            self._reshard()
            with self._average.swapped() if self._average else nullcontext():
                yield
                self._reshard()

    def _reshard(self) -> None:
        """Free parameters that an evaluation has left gathered."""
        if self.replica is not None:
            self.replica.reshard()

    def state(self, stored: Stored | None = None) -> dict[str, Tensor]:
        """The state of model and optimizer as tensors, under names that all strategies share.

        Sharded tensors are DTensors, so DCP can load them with another number of ranks. `stored`
        are the tensors of a checkpoint; the result then has what it can be read into.
        """
        self._reshard()
        optimizers.complete_state(self._local_optimizer)
        model, optimizer = self._state_dicts()
        state = {f"model.{name}": value for name, value in model.items()}
        changed = self._group_settings.changed(self._local_optimizer)
        for name, value in optimizer.items():
            setting = _setting(name)
            if not setting or setting in changed or _is_stored(f"optimizer.{name}", stored):
                state[f"optimizer.{name}"] = value
        state |= self._average.state() if self._average else {}
        return stored_state.encode(state) if stored is None else stored_state.targets(state, stored)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load what `state` returned after a checkpoint has been read into it.

        Raises InvalidFile if the checkpoint has bytes that are no value.
        """
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_state_dict,
        )

        state = stored_state.decode(tensors)
        model, optimizer = self._state_dicts()
        model |= _with_prefix(state, "model.")
        if not self._trains:
            set_model_state_dict(self.model, model)
            return
        optimizer |= _with_prefix(state, "optimizer.")
        set_state_dict(
            self.model,
            self._local_optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
        if self.optimizer is not self._local_optimizer:  # ZeRO 1 copies its own before each step
            local = self._local_optimizer.param_groups
            for group, loaded in zip(self.optimizer.param_groups, local, strict=True):
                group.update({key: loaded[key] for key in loaded if key != "params"})

    def _state_dicts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_state_dict,
        )

        if not self._trains:
            return get_model_state_dict(self.model), {}
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        try:
            model, optimizer = get_state_dict(self.model, self._local_optimizer, options=flat)
        except NotImplementedError as error:  # torch keeps tensors and numbers of an optimizer
            raise ConfigError(
                f"the optimizer's state cannot be saved in a checkpoint: {error}"
            ) from error
        return model, dict(optimizer)

    @property
    def _local_optimizer(self) -> Optimizer:
        """The optimizer of the parameters whose state this rank saves."""
        local: Optimizer = getattr(self.optimizer, "optim", self.optimizer)  # of ZeRO 1
        return local


def _sum(parts: Sequence[Callable[[], Tensor]]) -> Tensor:
    return torch.stack([part() for part in parts]).sum() if len(parts) > 1 else parts[0]()


def _setting(name: str) -> str:
    """``betas`` for ``param_groups.layer.weight.betas``; '' for the state of a parameter."""
    return name.rpartition(".")[2] if name.startswith("param_groups.") else ""


def _is_stored(name: str, stored: Stored | None) -> bool:
    prefixes = ("", stored_state.NUMBER, stored_state.OBJECT)
    return stored is not None and any(prefix + name in stored for prefix in prefixes)


def _with_prefix(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose names start with `prefix`, without it."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
