"""Pipeline parallelism: ranks hold different layers, and micro-batches pass from rank to rank.

Stage s is on the ranks whose position in their pipeline is s modulo its size. The last stage
computes the loss. Within a stage, ranks share or replicate the layers as `parallelize` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.utils import _pytree as pytree

from trainer import data
from trainer.data import Batch
from trainer.measure.timing import StepTimer
from trainer.parallel import layers, parallelize, shards
from trainer.parallel.process_group import broadcast_from_rank_zero
from trainer.parallel.stages import Cut, Layer, as_returned, split
from trainer.seeds import mixed, seed_all
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
        world = torch.distributed.group.WORLD
        assert world is not None  # noqa: S101 - the trainer has joined one
        self.group: ProcessGroup = setup.layout.mesh.group("pp") if self._size > 1 else world
        # the rest of the whole model is freed once the stages of this rank are cut out
        model = setup.weights.build()
        setup.weights.fill(model, torch.device("cpu"))
        micro_batch = data.split(setup.sample, setup.options.micro_batches, setup.task)[0]
        cut = Cut(model, setup.task.layers, micro_batch, setup.objective)
        self._boxed = cut.boxed
        numbers = self._split(cut)
        cut.check_tied(numbers)
        own = range(setup.layout.position.pp, len(numbers), self._size)
        parts = [(numbers[stage], cut.part(numbers[stage])) for stage in own]
        self.parts = [part for _, part in parts]
        known = [[cut.layers[number] for number in stage] for stage in numbers]
        self._stages = [
            self._stage(part, number, known) for number, part in zip(own, self.parts, strict=True)
        ]
        self.model = cut.merged(parts)
        name = setup.layout.schedule
        self._schedule: Any = SCHEDULES[name](
            self._stages if name == "interleaved" else self._stages[0],
            n_microbatches=setup.options.micro_batches,
            loss_fn=self._micro_batch_loss,
            scale_grads=False,  # the loss is a part of the global mean already
        )

    @property
    def _size(self) -> int:
        return self._setup.layout.dims.pp

    def _split(self, cut: Cut) -> list[range]:
        """The layers of each stage: by their time, measured on rank 0, or by their number."""
        setup, known = self._setup, cut.layers
        context, layout, micro_batches = setup.context, setup.layout, setup.options.micro_batches
        balance, costs = setup.options.balance or "time", [1.0] * len(known)
        if balance == "time":
            measured = cut.measure(context.device) if context.is_rank_zero else None
            costs = broadcast_from_rank_zero(context, measured)
        numbers = split(known, self._size * layout.stages_per_rank, costs)
        described = []
        for stage in numbers:
            milliseconds = sum(costs[number] for number in stage) * 1000
            names = " ".join(known[number].name for number in stage)
            described.append(f"[{names}]" + f" {milliseconds:.2f} ms" * (balance == "time"))
        bubble = ideal_bubble(self._size, micro_batches, layout.stages_per_rank)
        context.log(
            f"pipeline: {layout.schedule}, {micro_batches} micro-batches, "
            f"{len(numbers)} stages by {balance}: {', '.join(described)}; bubble {bubble:.1%} "
            "if stages are equal"
        )
        return numbers

    def _stage(self, part: nn.Module, number: int, known: Sequence[Sequence[Layer]]) -> _Stage:
        """A stage that is told its input and output shapes, so that torch need not trace it.

        Tracing would run DDP's hooks, after which the first backward pass of GPipe fails.
        """
        setup, last = self._setup, number == len(known) - 1
        parallelize.prepare_layers(part, setup)
        own = [part.get_submodule(layer.name) for layer in known[number]]
        replica = parallelize.distribute(part, layers.names(part, lambda _: own), setup)
        outputs = known[number][-1].hidden
        stage = _Stage(
            replica.module,
            number,
            len(known),
            setup.context.device,
            input_args=self._passed_on(known[number - 1][-1]) if number else (),
            output_args=outputs.requires_grad_() if last else self._passed_on(known[number][-1]),
            group=self.group,
        )
        stage.timer = setup.timer
        return stage

    def _passed_on(self, layer: Layer) -> Tensor:
        """Hidden states (batch, sequence, ...) of a layer: with sequence parallelism, a part."""
        hidden = layer.hidden
        if self._setup.options.sequence_parallel:
            hidden = hidden[:, : hidden.shape[1] // self._setup.layout.dims.tp]
        return torch.empty_like(hidden).requires_grad_()

    def forward(self, inputs: Any) -> Any:
        """The scores (batch, ..., classes) on the last stage, None on the others."""
        first = next(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
        self._feed(inputs)
        # eval requires a target and does not use it
        scores: Tensor | None = self._schedule.eval(target=first)
        return scores if scores is None else as_returned(shards.whole(scores), boxed=self._boxed)

    def _feed(self, inputs: Any) -> None:
        """Give each stage the inputs of each micro-batch."""
        parts = self._setup.options.micro_batches
        pieces = [data.piece(inputs, number, parts) for number in range(parts)]
        for stage in self._stages:
            stage.inputs = pieces

    def seed(self, seed: int) -> None:
        """Let all stages draw the same in the next step."""
        for stage in self._stages:
            stage.seed = seed

    def backward(self, batch: Batch, factor: float) -> Tensor:
        """Run the schedule on a batch, with the loss times `factor`; see `Strategy.backward`.

        Only the last stage has a loss.
        """
        self._factor, self._batch = factor, batch
        self._loss = torch.zeros((), dtype=torch.float64, device=self._setup.context.device)
        self._feed(batch.inputs)
        with self._setup.timer("pipeline"):
            self._schedule.step(target=batch.targets, return_outputs=False)
        return self._loss

    def _micro_batch_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The scaled loss of one micro-batch, on the last stage; 0 in evaluation."""
        if not torch.is_grad_enabled():
            return torch.zeros((), device=self._setup.context.device)
        with self._setup.timer("forward"):
            count = self._setup.task.targets_in(targets)
            batch = Batch(scores, targets, count, self._batch.total)
            loss = self._objective.loss(as_returned(scores, boxed=self._boxed), batch)
            self._loss += loss.detach()
            return loss * self._factor


def ideal_bubble(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """The share of a step in which ranks wait, with equal stages and free communication.

    (p - 1) / (v * m + p - 1) for p ranks, m micro-batches and v stages per rank; v = 1 for GPipe
    and 1F1B. Sources: https://arxiv.org/abs/1811.06965, section 2.3, and
    https://arxiv.org/abs/2104.04473, section 2.2, which gives the bubble as a share of the compute
    time, (p - 1) / (v * m), not of the step.
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


class _Stage(PipelineStage):
    """A stage that runs with the inputs of a batch, and times its compute.

    Communication happens outside of these methods. In evaluation nothing is timed.
    """

    timer: StepTimer
    inputs: Sequence[Any] = ()
    """Inputs of the model for each micro-batch."""
    seed: int = 0
    """All stages draw what follows from this and the micro-batch."""

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *more: Any, **options: Any
    ) -> Any:
        """The forward pass of one micro-batch."""
        kwargs = {"inputs": self.inputs[fwd_chunk_id]}
        run = partial(super().forward_one_chunk, fwd_chunk_id, args, kwargs, *more, **options)
        if not self.has_backward:
            return run()
        seed_all(mixed(self.seed, fwd_chunk_id))
        with self.timer("forward"):
            return run()

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        """The backward pass of one micro-batch; nothing to do in evaluation."""
        if self.has_backward:
            with self.timer("backward"):
                super().backward_one_chunk(*arguments, **options)
