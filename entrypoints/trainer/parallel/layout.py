"""How many ranks each dimension of a strategy gets, and whether options, model and ranks fit."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch.distributed import ProcessGroup
from torch.torch_version import TorchVersion

from trainer.data import DataShard
from trainer.errors import ConfigError
from trainer.parallel.parallel_dims import ParallelDims, RankMesh
from trainer.parallel.presets import STRATEGIES, Preset
from trainer.parallel.process_group import DistributedContext, divisors
from trainer.train_options import TrainOptions

FULL_WORLD_SIZE = "DEPLOYKIT_FULL_WORLD_SIZE"
"""Variable with the number of ranks of all nodes, in a job that may lose some of them."""
HIDDEN_SIZE = 64
"""Outputs of the layer `hidden` of the digits model, the only one that is sharded."""


def accumulate(options: TrainOptions, context: DistributedContext) -> TrainOptions:
    """More micro-batches while nodes are lost, so that no rank has more samples at once."""
    full = int(os.environ.get(FULL_WORLD_SIZE) or context.world_size)
    if full <= context.world_size:
        return options
    micro_batches = options.micro_batches * math.ceil(full / context.world_size)
    ranks = f"{context.world_size} of {full} ranks"
    context.log(f"{ranks}: {micro_batches} micro-batch(es) for the same global batch")
    return replace(options, micro_batches=micro_batches)


class Layout:
    """The place of this rank among all ranks.

    Raises ConfigError, with all problems, if options and ranks do not fit together.
    """

    def __init__(self, options: TrainOptions, context: DistributedContext) -> None:
        self.options = options
        self.context = context
        self.preset = STRATEGIES[options.strategy]
        self.dims = _dims(options, self.preset, context)
        if problems := [*_problems(options, self.preset, self.dims, context)]:
            raise ConfigError("; ".join(problems))
        self.position = self.dims.position(context.rank)

    @cached_property
    def mesh(self) -> RankMesh:
        """The mesh of all ranks. Collective when it is first used."""
        return RankMesh(self.dims, self.context)

    @cached_property
    def data_shard(self) -> DataShard:
        """The part of each global batch for this rank. Collective when it is first used."""
        index = self.position.dp_replicate * self.dims.dp_shard + self.position.dp_shard
        return DataShard(index, self.dims.dp, self._data_group, equal_sizes=self.preset.pipeline)

    @cached_property
    def token_shard(self) -> DataShard:
        """The part of all positions of a global batch for this rank: of its samples, or of their
        sequences. Collective when it is first used.
        """
        samples, parts = self.data_shard, self.dims.cp
        if parts == 1:
            return samples
        ranks = samples.num_shards * parts
        group = None
        if ranks != self.dims.ranks:
            group = self.mesh.group("dp_replicate", "dp_shard", "cp")
        return DataShard(samples.index * parts + self.position.cp, ranks, group)

    @property
    def _data_group(self) -> ProcessGroup | None:
        if self.dims.dp in (1, self.dims.ranks):
            return None
        return self.mesh.group("dp_replicate", "dp_shard")

    @property
    def contributes_loss(self) -> bool:
        """Whether this rank's loss and metrics enter the sums over all ranks.

        Of ranks that work on the same samples, one does: the last stage of a pipeline has them.
        """
        return self.position.tp == 0 and self.position.pp == self.dims.pp - 1

    @property
    def random_stream(self) -> int:
        """Ranks with the same number draw the same random numbers.

        Ranks with other samples or positions draw others, and so do the stages of a pipeline; the
        ranks that share a layer draw the same.
        """
        return self.token_shard.index * self.dims.pp + self.position.pp


def _dims(options: TrainOptions, preset: Preset, context: DistributedContext) -> ParallelDims:
    """The sizes that the options ask for, and defaults. Their product may miss the ranks."""
    world, node = context.world_size, context.local_world_size
    pp = _pipeline_size(options, preset, world)
    cp = options.context_parallel or 1
    tp = _tensor_size(options, preset, world // (pp * cp), node // cp)
    rest = max(1, world // (pp * cp * tp))
    if preset.data == "hsdp":
        shard = options.shard_ranks or min(rest, max(1, node // (cp * tp)))
        return ParallelDims(pp, max(1, rest // shard), shard, cp, tp)
    if preset.data in {"", "dp"}:
        return ParallelDims(pp, 1, 1, cp, tp)
    if preset.data in {"zero2", "zero3"}:
        return ParallelDims(pp, 1, rest, cp, tp)
    return ParallelDims(pp, rest, 1, cp, tp)


def _pipeline_size(options: TrainOptions, preset: Preset, world: int) -> int:
    if not preset.pipeline:
        return 1
    whole = not (preset.data or preset.tensor)
    return options.pipeline_parallel or (world if whole else min(2, world))


def _tensor_size(options: TrainOptions, preset: Preset, ranks: int, node: int) -> int:
    """Of `ranks` that a stage has: all, or with data parallelism a node's, or 2 in 3 dimensions."""
    if not preset.tensor:
        return 1
    if options.tensor_parallel:
        return options.tensor_parallel
    if not preset.data:
        return max(1, ranks)
    three = preset.pipeline or preset.data == "hsdp"
    return min(2, max(1, ranks)) if three else max(1, node)


def _problems(
    options: TrainOptions, preset: Preset, dims: ParallelDims, context: DistributedContext
) -> Iterator[str]:
    """Why options, model and ranks do not fit together."""
    yield from _version_problems(options.strategy, preset, context.device)
    if preset.tensor:
        yield from _model_problems(options, dims)
    world = context.world_size
    sizes = [*_part_problems(dims.cp, world)] or [*_size_problems(options, preset, dims, world)]
    yield from sizes
    if dims.cp > 1:
        yield from _sequence_problems(options, dims.cp)
    if preset.pipeline:
        yield from _schedule_problems(options, dims.pp)
    if preset.data in {"ddp", "zero1"}:
        yield from _ddp_problems(options, context.device)
    parts = dims.dp * options.micro_batches
    uneven = FULL_WORLD_SIZE in os.environ and not preset.pipeline
    if not sizes and not uneven and options.batch_size % parts:
        yield (
            f"--batch-size {options.batch_size} must be a multiple of {parts}: "
            f"{dims.dp} data shard(s) times {options.micro_batches} micro-batch(es)"
        )


def _version_problems(name: str, preset: Preset, device: torch.device) -> Iterator[str]:
    """Why this PyTorch cannot run a strategy: what failed where it was tried, from 2.6 on."""
    version, on_cpu = TorchVersion(torch.__version__), device.type == "cpu"
    if version < "2.10" and (preset.tensor or (preset.pipeline and on_cpu)):
        yield f"--strategy {name} requires PyTorch 2.10 or newer, and this is {version}"
    elif version < "2.7" and preset.sharded and on_cpu:
        yield f"--strategy {name} requires PyTorch 2.7 or newer on the CPU, and this is {version}"


def _part_problems(parts: int, world: int) -> Iterator[str]:
    """Why so many ranks cannot share each sequence."""
    if world % parts:
        yield (
            f"--context-parallel {parts} does not divide the {world} ranks: "
            f"use one of {divisors(world)}"
        )


def _size_problems(
    options: TrainOptions, preset: Preset, dims: ParallelDims, world: int
) -> Iterator[str]:
    """Problems with the number of ranks; of each strategy, the one that its options allow."""
    name = options.strategy
    if preset == Preset() and world > 1:
        yield (
            f"--strategy single is for one process, not {world} ranks: "
            "choose another strategy, such as ddp, or start one process"
        )
    elif preset.data == "dp" and (world > 1 or not torch.cuda.is_available()):
        yield (
            "--strategy dp requires one process and a GPU, not "
            f"{world} rank(s) and {torch.cuda.device_count()} GPU(s): "
            "use ddp, which also runs on CPUs and on several machines"
        )
    elif name == "tp" and dims.tp != world:
        yield (
            f"--strategy tp shares one model among all {world} ranks, which contradicts "
            f"--tensor-parallel {dims.tp}: remove that option, or choose tp-dp or fsdp-tp"
        )
    elif name == "pp" and dims.pp != world:
        yield (
            f"--strategy pp is one pipeline over all {world} rank(s), which contradicts "
            f"--pipeline-parallel {dims.pp}: remove that option, or use pp-dp for several"
        )
    elif preset.pipeline and name != "pp":
        yield from _pipelines_problems(options, preset, dims, world)
    elif preset.tensor and world // dims.cp % dims.tp:
        among = f"{world} ranks" if dims.cp == 1 else f"{world // dims.cp} ranks of each part"
        yield (
            f"--tensor-parallel {dims.tp} does not divide the {among}: "
            f"use one of {divisors(world // dims.cp)}"
        )
    elif dims.ranks != world:  # hsdp
        inner = {name: size for name, size in (("cp", dims.cp), ("tp", dims.tp)) if size > 1}
        outside = " and ".join(f"{size} for {name}" for name, size in inner.items())
        rest = world // (dims.cp * dims.tp)
        yield (
            f"--shard-ranks {dims.dp_shard} does not divide the {rest} ranks"
            f"{' outside of ' * bool(inner)}{outside}: use one of {divisors(rest)}"
        )


def _pipelines_problems(
    options: TrainOptions, preset: Preset, dims: ParallelDims, world: int
) -> Iterator[str]:
    """Problems with the number of ranks where a pipeline is one of several dimensions."""
    name = options.strategy
    if not preset.tensor:
        if world % dims.pp or not 1 < dims.pp < world:
            sizes = [str(each) for each in range(2, world) if world % each == 0]
            advice = f"use {' or '.join(sizes)}" if sizes else "start 4 ranks or more"
            yield (
                f"--strategy {name} cannot divide {world} rank(s) into "
                f"several pipelines of --pipeline-parallel {dims.pp}: {advice}"
            )
    elif dims.ranks != world or dims.pp == 1 or dims.tp == 1:
        smallest = 4 * (2 if preset.data else 1) * (2 if preset.data == "hsdp" else 1)
        shards = f" x --shard-ranks {dims.dp_shard}" if preset.data == "hsdp" else ""
        yield (
            f"--strategy {name} cannot arrange {world} rank(s) as --pipeline-parallel {dims.pp} x "
            f"--tensor-parallel {dims.tp}{shards}{' x any number' if preset.data else ''}: choose "
            f"sizes of at least 2 whose product {'divides' if preset.data else 'is'} {world}, or "
            f"start {smallest} ranks"
        )


def _schedule_problems(options: TrainOptions, ranks: int) -> Iterator[str]:
    """Problems with schedule, micro-batches and stages of a pipeline of so many ranks."""
    name, stages, micro_batches = schedule(options), stages_per_rank(options), options.micro_batches
    interleaved = name == "interleaved"
    if interleaved != (stages > 1):
        yield (
            f"--stages-per-rank {stages} contradicts --schedule {name}: only "
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


def schedule(options: TrainOptions) -> str:
    """The order of a pipeline's micro-batches."""
    return options.schedule or "1f1b"


def stages_per_rank(options: TrainOptions) -> int:
    """Stages of a pipeline on each rank."""
    return options.stages_per_rank or (2 if schedule(options) == "interleaved" else 1)


def _ddp_problems(options: TrainOptions, device: torch.device) -> Iterator[str]:
    if options.compress == "bf16" and device.type != "cuda":
        yield "--compress bf16 requires GPUs (NCCL 2.10 or later); fp16 works with gloo"
    if options.static_graph and options.micro_batches > 1 and not options.reduce_each:
        yield (
            "--static-graph requires gradients to be reduced in every backward pass, which "
            "--micro-batches above 1 skips until the last one: use one of the two, or --reduce-each"
        )


def _sequence_problems(options: TrainOptions, parts: int) -> Iterator[str]:
    """Why the sequences of our tasks cannot be divided into so many parts."""
    if options.compile:
        yield "--context-parallel does not work with --compile: remove one of the two"
    if options.task == "digits":
        yield "--context-parallel requires a sequence: choose --task text, or remove the option"
    if options.task == "text" and options.sequence % parts:
        longer = math.ceil(options.sequence / parts) * parts
        yield (
            f"--context-parallel {parts} does not divide --sequence {options.sequence}: "
            f"choose --sequence {longer}"
        )


def _model_problems(options: TrainOptions, dims: ParallelDims) -> Iterator[str]:
    """Why the layers of our models cannot be shared by so many ranks."""
    ranks, length = dims.tp, options.sequence // dims.cp
    if options.task not in ("digits", "text"):
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
    for name in ("sequence_parallel", "loss_parallel"):
        if getattr(options, name) and not text:
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} requires a sequence: choose --task text, or remove the option"
    if text and options.sequence_parallel and length % ranks:
        parts = ranks * dims.cp
        longer = math.ceil(options.sequence / parts) * parts
        yield (
            f"--sequence-parallel requires --sequence {options.sequence} to be a multiple of the "
            f"{parts} ranks: choose --sequence {longer}"
        )
