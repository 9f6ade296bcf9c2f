"""Pipeline parallelism: each rank holds some layers, and micro-batches pass from rank to rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from trainer import bubble, partition
from trainer.bubble import BubbleMeter, TimedStage
from trainer.data import Batch, DataShard
from trainer.errors import ConfigError
from trainer.partition import MeasuredLayer, Stages
from trainer.process_group import DistributedContext, broadcast_from_rank_zero
from trainer.strategies.single import CreateOptimizer, Single
from trainer.train_options import TrainOptions

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class PP(Single):
    """One pipeline over all ranks.

    Stage s is on rank s modulo the pipeline size. The last stage computes the loss.
    """

    def __init__(self, options: TrainOptions, context: DistributedContext) -> None:
        size = options.pipeline_parallel or self.default_pipeline_size(context.world_size)
        self.pipeline_size = size
        self.schedule_name = options.schedule or "1f1b"
        default = 2 if self.schedule_name == "interleaved" else 1
        self.stages_per_rank = options.stages_per_rank or default
        super().__init__(options, context)
        mesh = context.mesh(pp=size, dp=context.world_size // size)
        self.pipeline_group, self.data_mesh = mesh.get_group("pp"), mesh["dp"]
        self.pipeline_rank = mesh.get_local_rank("pp")
        group = self.data_mesh.get_group()
        index, shards = mesh.get_local_rank("dp"), self.data_mesh.size()
        self.data_shard = DataShard(index, shards, group, equal_sizes=True)
        self.averaging_ranks = self.data_shard.num_shards
        self.contributes_loss = self.pipeline_rank == size - 1
        self.bubble = BubbleMeter(context.device, self.pipeline_group)

    @staticmethod
    def default_pipeline_size(world_size: int) -> int:
        """The number of ranks in a pipeline without --pipeline-parallel."""
        return world_size

    def check(self) -> None:
        """Raise ConfigError, with all problems, if ranks, stages and schedule do not fit."""
        problems = [*self.world_size_problems(), *self._schedule_problems()]
        if problems:
            raise ConfigError("; ".join(problems))

    def world_size_problems(self) -> Iterator[str]:
        """Problems with the number of ranks."""
        size, world_size = self.pipeline_size, self.context.world_size
        if size != world_size:
            yield (
                f"--strategy pp is one pipeline over all {world_size} rank(s), which contradicts "
                f"--pipeline-parallel {size}: remove that option, or use pp-dp for several"
            )

    def _schedule_problems(self) -> Iterator[str]:
        """Problems with schedule, micro-batches and stages."""
        name, micro_batches = self.schedule_name, self.options.micro_batches
        ranks, interleaved = self.pipeline_size, self.schedule_name == "interleaved"
        if interleaved != (self.stages_per_rank > 1):
            yield (
                f"--stages-per-rank {self.stages_per_rank} contradicts --schedule {name}: only "
                "interleaved has several stages per rank, and requires at least 2"
            )
        if interleaved and ranks == 1:
            yield "--schedule interleaved requires at least two ranks: use 1f1b, or start more"
        if interleaved and micro_batches % ranks:
            yield (
                f"--micro-batches {micro_batches} must be a multiple of the {ranks} ranks of a "
                f"pipeline for --schedule interleaved: {4 * ranks} is a good value"
            )
        if name == "1f1b" and micro_batches < ranks:
            yield (
                f"--micro-batches {micro_batches} must be at least the {ranks} stages for "
                f"--schedule 1f1b, or ranks stay idle: {4 * ranks} is a good value"
            )

    def prepare(self, model: nn.Module, create_optimizer: CreateOptimizer) -> None:
        """Partition the model, keep this rank's stages and set up the schedule."""
        if not isinstance(model, nn.Sequential):
            raise ConfigError(
                f"--strategy {self.options.strategy} cuts an nn.Sequential between its layers, "
                f"and {type(model).__name__} is none: make it one, or choose another strategy, "
                "such as fsdp"
            )
        self.wrap_layers(model)
        stages = self._partition(model)
        self.context.log(self._description(stages))
        layers = dict(model.named_children())
        numbers = range(self.pipeline_rank, len(stages), self.pipeline_size)
        parts = [OrderedDict((each.name, layers[each.name]) for each in stages[n]) for n in numbers]
        self.model = nn.Sequential(OrderedDict(pair for part in parts for pair in part.items()))
        self.model.to(self.context.device)
        modules = [self.replicate(StageModule(part, self)) for part in parts]
        self.optimizer = self.make_optimizer(create_optimizer)
        pipeline_stages = [
            self._stage(module, number, stages)
            for module, number in zip(modules, numbers, strict=True)
        ]
        self.schedule = SCHEDULES[self.schedule_name](
            pipeline_stages if self.schedule_name == "interleaved" else pipeline_stages[0],
            n_microbatches=self.options.micro_batches,
            loss_fn=self._micro_batch_loss,
            scale_grads=False,  # the loss is a part of the global mean already
        )

    def replicate(self, stage: StageModule) -> nn.Module:
        """Parallelize a stage over the ranks that hold it in other pipelines, if there are any."""
        return stage

    def _partition(self, model: nn.Sequential) -> Stages:
        """The layers of each stage, as measured on rank 0."""
        layers = self._measure_layers(model) if self.context.is_rank_zero else None
        layers = broadcast_from_rank_zero(self.context, layers)
        by = partition.by_layers if self.options.balance == "layers" else partition.by_time
        return by(layers, self.pipeline_size * self.stages_per_rank)

    def _measure_layers(self, model: nn.Sequential) -> list[MeasuredLayer]:
        batch = self.micro_batches(self.sample)[0]

        def forward(layer: nn.Module, inputs: Tensor) -> Tensor:
            with self.autocast():
                output: Tensor = layer(inputs)
            return output

        return partition.measure_layers(
            model, batch.inputs, forward, lambda scores: self.loss(scores, batch)
        )

    def _description(self, stages: Stages) -> str:
        """The stages with their times, and the predicted bubble."""
        seconds = [sum(layer.seconds for layer in stage) for stage in stages]
        size = self.pipeline_size
        self.seconds_by_rank = [sum(seconds[rank::size]) for rank in range(size)]
        described = ", ".join(
            f"[{' '.join(layer.name for layer in stage)}] {each * 1000:.2f} ms"
            for stage, each in zip(stages, seconds, strict=True)
        )
        balance, micro_batches = self.options.balance or "time", self.options.micro_batches
        predicted = bubble.predicted(self.seconds_by_rank, micro_batches, self.stages_per_rank)
        ideal = bubble.ideal(size, micro_batches, self.stages_per_rank)
        return (
            f"pipeline: {self.schedule_name}, {micro_batches} micro-batches, {len(stages)} stages "
            f"by {balance}: {described}; bubble {predicted:.1%} predicted, {ideal:.1%} ideal"
        )

    def _stage(self, module: nn.Module, number: int, stages: Stages) -> TimedStage:
        """A stage that is told its input and output shapes, so that torch need not trace it.

        Tracing would run DDP's hooks, after which the first backward pass of GPipe fails.
        """
        sample = self.micro_batches(self.sample)[0].inputs
        inputs = stages[number - 1][-1].output.requires_grad_() if number else sample
        stage = TimedStage(
            module,
            number,
            len(stages),
            self.context.device,
            input_args=inputs,
            output_args=stages[number][-1].output.requires_grad_(),
            group=self.pipeline_group,
        )
        stage.timer, stage.bubble = self.timer, self.bubble
        return stage

    def forward(self, inputs: Tensor) -> Tensor | None:
        """The scores (batch, ..., classes) on the last stage, None on the others."""
        # eval requires a target and does not use it
        scores: Tensor | None = self.schedule.eval(inputs, target=inputs)
        return scores

    def backward(self, batch: Batch, loss_scale: float = 1.0) -> Tensor:
        """Run the schedule on a batch; see `Single.backward`. Only the last stage has a loss."""
        self._factor, self._batch = self.averaging_ranks * loss_scale, batch
        self._loss = torch.zeros((), dtype=torch.float64, device=self.context.device)
        with self.bubble.step():
            self.schedule.step(batch.inputs, target=batch.targets, return_outputs=False)
        return self._loss

    def _micro_batch_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The scaled loss of one micro-batch, on the last stage; 0 in evaluation."""
        if not torch.is_grad_enabled():
            return scores.new_zeros(())
        with self.timer("forward"), self.bubble.busy():
            count = self.task.targets_in(targets)
            loss = self.loss(scores, Batch(scores, targets, count, self._batch.total))
            self._loss += loss.detach()
            return loss * self._factor

    @property
    def random_stream(self) -> int:
        """Stages of a pipeline draw different random numbers."""
        return self.data_shard.index * self.pipeline_size + self.pipeline_rank

    @property
    def model_parallel_groups(self) -> Sequence[ProcessGroup]:
        """The ranks of a pipeline hold different stages."""
        return (self.pipeline_group,)

    def extra_metrics(self) -> dict[str, float]:
        """The measured bubble since the last logged step."""
        share = self.bubble.latest()
        return {} if share is None else {"bubble": share}

    def summary(self) -> str:
        """The measured bubble of the run, as a mean and per rank."""
        shares = self.bubble.shares()
        if not shares:
            return ""
        by_rank = ", ".join(f"{share:.1%}" for share in shares)
        mean = sum(shares) / len(shares)
        return f"pipeline: bubble {mean:.1%} measured (by rank: {by_rank})"


class StageModule(nn.Sequential):
    """Consecutive layers, run in the strategy's precision."""

    def __init__(self, layers: OrderedDict[str, nn.Module], strategy: Single) -> None:
        super().__init__(layers)
        self._autocast = strategy.autocast

    def forward(self, inputs: Tensor) -> Tensor:
        """Hidden states of the previous stage to those of the next."""
        with self._autocast():
            outputs: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs
