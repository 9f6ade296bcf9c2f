"""Pipeline parallelism: ranks hold different layers, and micro-batches pass from rank to rank.

Stage s is on the ranks whose position in their pipeline is s modulo its size. The last stage
computes the loss. Within a stage, ranks share or replicate the layers as `parallelize` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from trainer import bubble, data, layers, parallelize, partition
from trainer.bubble import BubbleMeter, TimedStage
from trainer.data import Batch
from trainer.errors import ConfigError
from trainer.layout import schedule, stages_per_rank
from trainer.objective import Objective
from trainer.partition import MeasuredLayer, Stages
from trainer.process_group import broadcast_from_rank_zero
from trainer.setup import Setup

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class Pipeline:
    """The stages of this rank, and the schedule that runs them. Collective.

    `model` has the layers of this rank by their names in the whole model. Raises ConfigError if the
    model cannot be cut.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._objective = setup.objective
        self.group: ProcessGroup = setup.layout.mesh.group("pp") if self._size > 1 else _alone()
        self._bubble = BubbleMeter(setup.context.device, self.group)
        whole = _sequential(setup)
        parallelize.prepare_layers(whole, setup)
        cut = self._cut(whole)
        setup.context.log(self._description(cut))
        parts = {number: self._part(whole, cut[number]) for number in self._numbers(cut)}
        self.model = nn.Sequential(OrderedDict(_children(parts.values())))
        stages = [self._stage(part, number, cut) for number, part in parts.items()]
        name = schedule(setup.options)
        self._schedule: Any = SCHEDULES[name](
            stages if name == "interleaved" else stages[0],  # type: ignore[arg-type]
            n_microbatches=setup.options.micro_batches,
            loss_fn=self._micro_batch_loss,
            scale_grads=False,  # the loss is a part of the global mean already
        )

    @property
    def _size(self) -> int:
        return self._setup.layout.dims.pp

    def _numbers(self, cut: Stages) -> range:
        """The stages of this rank."""
        return range(self._setup.layout.position.pp, len(cut), self._size)

    def _cut(self, model: nn.Sequential) -> Stages:
        """The layers of each stage, as measured on rank 0."""
        setup = self._setup
        measured = self._measure_layers(model) if setup.context.is_rank_zero else None
        measured = broadcast_from_rank_zero(setup.context, measured)
        by = partition.by_layers if setup.options.balance == "layers" else partition.by_time
        return by(measured, self._size * stages_per_rank(setup.options))

    def _measure_layers(self, model: nn.Sequential) -> list[MeasuredLayer]:
        batch, objective = self._micro_batch, self._objective
        return partition.measure_layers(
            model, batch.inputs, objective.outputs, lambda scores: objective.loss(scores, batch)
        )

    @property
    def _micro_batch(self) -> Batch:
        """The first micro-batch of the sample."""
        setup = self._setup
        return data.split(setup.sample, setup.options.micro_batches, setup.task)[0]

    def _description(self, cut: Stages) -> str:
        """The stages with their times, and the predicted bubble."""
        seconds = [sum(layer.seconds for layer in stage) for stage in cut]
        size, options = self._size, self._setup.options
        self.seconds_by_rank = [sum(seconds[rank::size]) for rank in range(size)]
        described = ", ".join(
            f"[{' '.join(layer.name for layer in stage)}] {each * 1000:.2f} ms"
            for stage, each in zip(cut, seconds, strict=True)
        )
        balance, micro_batches = options.balance or "time", options.micro_batches
        per_rank = stages_per_rank(options)
        predicted = bubble.predicted(self.seconds_by_rank, micro_batches, per_rank)
        ideal = bubble.ideal(size, micro_batches, per_rank)
        return (
            f"pipeline: {schedule(options)}, {micro_batches} micro-batches, {len(cut)} stages "
            f"by {balance}: {described}; bubble {predicted:.1%} predicted, {ideal:.1%} ideal"
        )

    def _part(self, model: nn.Sequential, stage: list[MeasuredLayer]) -> StageModule:
        children = dict(model.named_children())
        named = OrderedDict((layer.name, children[layer.name]) for layer in stage)
        return StageModule(named, self._objective)

    def _stage(self, part: StageModule, number: int, cut: Stages) -> TimedStage:
        """A stage that is told its input and output shapes, so that torch need not trace it.

        Tracing would run DDP's hooks, after which the first backward pass of GPipe fails.
        """
        setup, last = self._setup, number == len(cut) - 1
        replica = parallelize.distribute(part, layers.names(part), setup)
        outputs = cut[number][-1].output.requires_grad_()
        stage = TimedStage(
            replica.module,
            number,
            len(cut),
            setup.context.device,
            input_args=self._passed_on(cut[number - 1]) if number else self._micro_batch.inputs,
            output_args=outputs if last else self._passed_on(cut[number]),
            group=self.group,
        )
        stage.timer, stage.bubble = setup.timer, self._bubble
        return stage

    def _passed_on(self, stage: list[MeasuredLayer]) -> Tensor:
        """Hidden states (batch, sequence, ...) of a stage: with sequence parallelism, a part."""
        hidden = stage[-1].output
        if self._setup.options.sequence_parallel:
            hidden = hidden[:, : hidden.shape[1] // self._setup.layout.dims.tp]
        return torch.empty_like(hidden).requires_grad_()

    def forward(self, inputs: Tensor) -> Tensor | None:
        """The scores (batch, ..., classes) on the last stage, None on the others."""
        # eval requires a target and does not use it
        scores: Tensor | None = self._schedule.eval(inputs, target=inputs)
        return scores

    def backward(self, batch: Batch, factor: float) -> Tensor:
        """Run the schedule on a batch, with the loss times `factor`; see `Strategy.backward`.

        Only the last stage has a loss.
        """
        self._factor, self._batch = factor, batch
        self._loss = torch.zeros((), dtype=torch.float64, device=self._setup.context.device)
        with self._bubble.step():
            self._schedule.step(batch.inputs, target=batch.targets, return_outputs=False)
        return self._loss

    def _micro_batch_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The scaled loss of one micro-batch, on the last stage; 0 in evaluation."""
        if not torch.is_grad_enabled():
            return torch.zeros((), device=self._setup.context.device)
        with self._setup.timer("forward"), self._bubble.busy():
            count = self._setup.task.targets_in(targets)
            loss = self._objective.loss(scores, Batch(scores, targets, count, self._batch.total))
            self._loss += loss.detach()
            return loss * self._factor

    def metrics(self) -> dict[str, float]:
        """The measured bubble since the last logged step. Collective."""
        share = self._bubble.latest()
        return {} if share is None else {"bubble": share}

    def summary(self) -> str:
        """The measured bubble of the run, as a mean and per rank. Collective."""
        shares = self._bubble.shares()
        if not shares:
            return ""
        by_rank = ", ".join(f"{share:.1%}" for share in shares)
        mean = sum(shares) / len(shares)
        return f"pipeline: bubble {mean:.1%} measured (by rank: {by_rank})"


class StageModule(nn.Sequential):
    """Consecutive layers, run in the precision of the run."""

    def __init__(self, named: OrderedDict[str, nn.Module], objective: Objective) -> None:
        super().__init__(named)
        self._autocast = objective.autocast

    def forward(self, inputs: Tensor) -> Tensor:
        """Hidden states of the previous stage to those of the next."""
        with self._autocast():
            outputs: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs


def _sequential(setup: Setup) -> nn.Sequential:
    """The whole model, with weights, in CPU memory. Raises ConfigError if it cannot be cut."""
    model = setup.weights.build()
    if isinstance(model, nn.Sequential):
        setup.weights.fill(model, torch.device("cpu"))
        return model
    raise ConfigError(
        f"--strategy {setup.options.strategy} cuts an nn.Sequential between its layers, and "
        f"{type(model).__name__} is none: make it one, or choose another strategy, such as fsdp"
    )


def _children(parts: Any) -> Iterator[tuple[str, nn.Module]]:
    for part in parts:
        yield from part.named_children()


def _alone() -> ProcessGroup:
    """The group of a pipeline of one rank."""
    group = torch.distributed.group.WORLD
    assert group is not None  # noqa: S101 - the trainer has joined one
    return group
