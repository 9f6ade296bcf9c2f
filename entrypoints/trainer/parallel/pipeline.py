"""Pipeline parallelism: ranks hold different layers, and micro-batches pass from rank to rank.

Stage s is on the ranks whose position in their pipeline is s modulo its size. The last stage
computes the loss. Within a stage, ranks share or replicate the layers as `parallelize` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils import _pytree as pytree

from trainer import data
from trainer.data import Batch
from trainer.errors import ConfigError
from trainer.measure import bubble
from trainer.measure.bubble import BubbleMeter, TimedStage
from trainer.parallel import layers, parallelize, partition, shards
from trainer.parallel.cut import Cut, cut
from trainer.parallel.layout import schedule, stages_per_rank
from trainer.parallel.partition import MeasuredLayer, Stages
from trainer.parallel.process_group import broadcast_from_rank_zero
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
        # the rest of the whole model is freed once the stages of this rank are cut out
        whole = cut(setup, self._micro_batch)
        self._needs_inputs, self._boxed = whole.needs_inputs, whole.boxed
        stages = self._partition(whole)
        setup.context.log(self._description(stages))
        numbers = _layer_numbers(stages)
        whole.check_tied(numbers)
        own = range(setup.layout.position.pp, len(stages), self._size)
        parts = [(numbers[stage], whole.part(numbers[stage])) for stage in own]
        self.parts = [part for _, part in parts]
        self._stages = [
            self._stage(part, number, stages) for number, (_, part) in zip(own, parts, strict=True)
        ]
        self.model = whole.merged(parts)
        name = schedule(setup.options)
        self._schedule: Any = SCHEDULES[name](
            self._stages if name == "interleaved" else self._stages[0],
            n_microbatches=setup.options.micro_batches,
            loss_fn=self._micro_batch_loss,
            scale_grads=False,  # the loss is a part of the global mean already
        )

    @property
    def _size(self) -> int:
        return self._setup.layout.dims.pp

    def _partition(self, whole: Cut) -> Stages:
        """The layers of each stage, as measured on rank 0."""
        setup = self._setup
        measured = _measured(whole) if setup.context.is_rank_zero else None
        measured = broadcast_from_rank_zero(setup.context, measured)
        if isinstance(measured, ConfigError):
            raise measured
        by = partition.by_layers if setup.options.balance == "layers" else partition.by_time
        return by(measured, self._size * stages_per_rank(setup.options))

    @property
    def _micro_batch(self) -> Batch:
        """The first micro-batch of the sample."""
        setup = self._setup
        return data.split(setup.sample, setup.options.micro_batches, setup.task)[0]

    def _description(self, stages: Stages) -> str:
        """The stages with their times, and the predicted bubble."""
        seconds = [sum(layer.seconds for layer in stage) for stage in stages]
        size, options = self._size, self._setup.options
        self.seconds_by_rank = [sum(seconds[rank::size]) for rank in range(size)]
        described = ", ".join(
            f"[{' '.join(layer.name for layer in stage)}] {each * 1000:.2f} ms"
            for stage, each in zip(stages, seconds, strict=True)
        )
        balance, micro_batches = options.balance or "time", options.micro_batches
        per_rank = stages_per_rank(options)
        predicted = bubble.predicted(self.seconds_by_rank, micro_batches, per_rank)
        ideal = bubble.ideal(size, micro_batches, per_rank)
        return (
            f"pipeline: {schedule(options)}, {micro_batches} micro-batches, {len(stages)} stages "
            f"by {balance}: {described}; bubble {predicted:.1%} predicted, {ideal:.1%} ideal"
        )

    def _stage(self, part: nn.Module, number: int, stages: Stages) -> TimedStage:
        """A stage that is told its input and output shapes, so that torch need not trace it.

        Tracing would run DDP's hooks, after which the first backward pass of GPipe fails.
        """
        setup, last = self._setup, number == len(stages) - 1
        own = [layer.name for layer in stages[number]]
        if self._needs_inputs:
            parallelize.prepare_layers(part, setup)
        names = layers.names(part, lambda _: [part.get_submodule(n) for n in own])
        replica = parallelize.distribute(part, names, setup)
        outputs = stages[number][-1].output.requires_grad_()
        stage = TimedStage(
            replica.module,
            number,
            len(stages),
            setup.context.device,
            input_args=self._passed_on(stages[number - 1]) if number else self._first_inputs,
            output_args=outputs if last else self._passed_on(stages[number]),
            group=self.group,
        )
        stage.timer, stage.bubble = setup.timer, self._bubble
        return stage

    @property
    def _first_inputs(self) -> tuple[Tensor, ...]:
        """What the schedule hands to the first stage; torch 2.11 checks its shape."""
        return () if self._needs_inputs else (self._micro_batch.inputs,)

    def _passed_on(self, stage: Sequence[MeasuredLayer]) -> Tensor:
        """Hidden states (batch, sequence, ...) of a stage: with sequence parallelism, a part."""
        hidden = stage[-1].output
        if self._setup.options.sequence_parallel:
            hidden = hidden[:, : hidden.shape[1] // self._setup.layout.dims.tp]
        return torch.empty_like(hidden).requires_grad_()

    def forward(self, inputs: Any) -> Any:
        """The scores (batch, ..., classes) on the last stage, None on the others."""
        first = next(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
        # eval requires a target and does not use it
        scores: Tensor | None = self._schedule.eval(*self._fed(inputs), target=first)
        return None if scores is None else self._as_returned(shards.whole(scores))

    def _as_returned(self, scores: Tensor) -> Any:
        """Scores as the model itself returns them."""
        return SimpleNamespace(logits=scores) if self._boxed else scores

    def _fed(self, inputs: Any) -> tuple[Any, ...]:
        """What the schedule splits into micro-batches, or nothing if each stage is told here."""
        if not self._needs_inputs:
            return (inputs,)
        parts = self._setup.options.micro_batches
        pieces = [data.piece(inputs, number, parts) for number in range(parts)]
        for stage in self._stages:
            stage.inputs = pieces
        return ()

    def seed(self, seed: int) -> None:
        """Let all stages that run the model's own `forward` draw the same in the next step."""
        for stage in self._stages if self._needs_inputs else ():
            stage.seed = seed

    def backward(self, batch: Batch, factor: float) -> Tensor:
        """Run the schedule on a batch, with the loss times `factor`; see `Strategy.backward`.

        Only the last stage has a loss.
        """
        self._factor, self._batch = factor, batch
        self._loss = torch.zeros((), dtype=torch.float64, device=self._setup.context.device)
        with self._bubble.step():
            fed = self._fed(batch.inputs)
            self._schedule.step(*fed, target=batch.targets, return_outputs=False)
        return self._loss

    def _micro_batch_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The scaled loss of one micro-batch, on the last stage; 0 in evaluation."""
        if not torch.is_grad_enabled():
            return torch.zeros((), device=self._setup.context.device)
        with self._setup.timer("forward"), self._bubble.busy():
            count = self._setup.task.targets_in(targets)
            batch = Batch(scores, targets, count, self._batch.total)
            loss = self._objective.loss(self._as_returned(scores), batch)
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


def _measured(whole: Cut) -> list[MeasuredLayer] | ConfigError:
    """The layers, or why they cannot be measured, which other ranks need to know too."""
    try:
        return whole.measure()
    except ConfigError as error:
        return error


def _layer_numbers(stages: Stages) -> list[range]:
    """The numbers of the layers of each stage."""
    ends = list(accumulate(map(len, stages), initial=0))
    return [range(begin, end) for begin, end in pairwise(ends)]


def _alone() -> ProcessGroup:
    """The group of a pipeline of one rank."""
    group = torch.distributed.group.WORLD
    assert group is not None  # noqa: S101 - the trainer has joined one
    return group
