"""The strategies by name, the ranks of each dimension, and whether options and ranks fit.

A strategy combines dimensions of parallelism. Its layout says how many ranks each gets, and which
place this rank has among them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion

from trainer.data import DataShard
from trainer.errors import ConfigError
from trainer.parallel.process_group import DistributedContext, divisors
from trainer.train_options import TrainOptions

FULL_WORLD_SIZE = "DEPLOYKIT_FULL_WORLD_SIZE"
"""Variable with the number of ranks of all nodes, in a job that may lose some of them."""
HIDDEN_SIZE = 64
"""Outputs of the layer `hidden` of the digits model, the only one that is sharded."""


class Preset(NamedTuple):
    """A combination of dimensions. `layout` says how many ranks each gets."""

    data: str = ""
    """What ranks with different samples do: hold replicas (ddp, manual, dp), divide the optimizer
    state (zero1), or also gradients (zero2) and parameters (zero3), within groups of ranks (hsdp)
    or in groups of one, which hold replicas of what tensor parallelism has sharded (replicate)."""
    tensor: bool = False
    """Whether ranks share the layers of a model."""
    pipeline: bool = False
    """Whether ranks hold different layers."""

    @property
    def sharded(self) -> bool:
        """Whether `fully_shard` holds the parameters."""
        return self.data in {"zero2", "zero3", "hsdp", "replicate"}


STRATEGIES = {
    "single": Preset(),
    "dp": Preset("dp"),
    "ddp": Preset("ddp"),
    "manual": Preset("manual"),
    "zero1": Preset("zero1"),
    "zero2": Preset("zero2"),
    "zero3": Preset("zero3"),
    "fsdp": Preset("zero3"),
    "hsdp": Preset("hsdp"),
    "tp": Preset(tensor=True),
    "tp-dp": Preset("replicate", tensor=True),
    "fsdp-tp": Preset("zero3", tensor=True),
    "hsdp-tp": Preset("hsdp", tensor=True),
    "pp": Preset(pipeline=True),
    "pp-dp": Preset("ddp", pipeline=True),
    "pp-fsdp": Preset("zero3", pipeline=True),
    "pp-tp": Preset(tensor=True, pipeline=True),
    "pp-fsdp-tp": Preset("zero3", tensor=True, pipeline=True),
    "pp-hsdp-tp": Preset("hsdp", tensor=True, pipeline=True),
}
"""Value of --strategy to dimensions."""


class ParallelDims(NamedTuple):
    """One number for each dimension: of all ranks, or of one rank's position.

    The last dimension varies fastest, so that the ranks that communicate most are neighbors:
    those of a tensor-parallel group, then those that share sequences, then those that share shards,
    then replicas, then the stages of a pipeline.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def dp(self) -> int:
        """The number of ranks with different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        """The number of ranks in all."""
        return self.pp * self.dp * self.cp * self.tp

    def position(self, rank: int) -> ParallelDims:
        """The coordinates of a rank, each from 0."""
        coordinates = []
        for size in reversed(self):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return ParallelDims(*reversed(coordinates))


class RankMesh:
    """The mesh of all ranks, with an axis for each dimension that has more than one rank.

    Its axis `dp_shard` always exists, because `fully_shard` requires one. Ranks that share
    sequences share parameters like those with other samples: where parameters are meant, they are a
    part of `dp_shard`, and else an axis of their own, `cp`. Collective.
    """

    def __init__(self, dims: ParallelDims, context: DistributedContext) -> None:
        self._ranks = _mesh(dims, context)
        self._parameters = self._ranks
        if dims.cp > 1:
            self._parameters = _mesh(dims._replace(dp_shard=dims.dp_shard * dims.cp, cp=1), context)

    def axes(self, *names: str) -> DeviceMesh:
        """Those of these axes that exist, of the mesh over which parameters are distributed."""
        return _axes(self._parameters, names)

    def group(self, *names: str) -> ProcessGroup:
        """The ranks that differ from this one along these axes only."""
        mesh = _axes(self._ranks, names)
        if mesh.ndim == 1:
            return mesh.get_group()
        return mesh._flatten("_".join(names)).get_group()  # noqa: SLF001 - torch has no other name


def _mesh(dims: ParallelDims, context: DistributedContext) -> DeviceMesh:
    sizes = dims._asdict().items()
    return context.mesh(**{name: size for name, size in sizes if size > 1 or name == "dp_shard"})


def _axes(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The part of `mesh` with those of these axes that it has."""
    return mesh[tuple(name for name in names if name in (mesh.mesh_dim_names or ()))]


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
        if problems := [*_problems(self)]:
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
        group = None
        if self.dims.dp not in (1, self.dims.ranks):
            group = self.mesh.group("dp_replicate", "dp_shard")
        return DataShard(index, self.dims.dp, group, equal_sizes=self.preset.pipeline)

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
    def schedule(self) -> str:
        """The order of a pipeline's micro-batches."""
        return self.options.schedule or "1f1b"

    @property
    def stages_per_rank(self) -> int:
        """The stages of a pipeline on each rank."""
        return self.options.stages_per_rank or (2 if self.schedule == "interleaved" else 1)

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
    pp = 1
    if preset.pipeline:
        whole = not (preset.data or preset.tensor)
        pp = options.pipeline_parallel or (world if whole else min(2, world))
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


def _problems(layout: Layout) -> Iterator[str]:
    """Why options, model and ranks do not fit together."""
    options, preset, dims = layout.options, layout.preset, layout.dims
    yield from _version_problems(layout)
    if preset.tensor:
        yield from _model_problems(options, dims)
    sizes = list(_size_problems(layout))
    yield from sizes
    if dims.cp > 1:
        yield from _sequence_problems(options, dims.cp)
    if preset.pipeline:
        yield from _schedule_problems(layout)
    if preset.data in {"ddp", "zero1"}:
        yield from _ddp_problems(layout)
    parts = dims.dp * options.micro_batches
    uneven = FULL_WORLD_SIZE in os.environ and not preset.pipeline
    if not sizes and not uneven and options.batch_size % parts:
        yield (
            f"--batch-size {options.batch_size} must be a multiple of {parts}: "
            f"{dims.dp} data shard(s) times {options.micro_batches} micro-batch(es)"
        )


def _version_problems(layout: Layout) -> Iterator[str]:
    """Why this PyTorch cannot run a strategy: what failed where it was tried, from 2.6 on."""
    version, preset = TorchVersion(torch.__version__), layout.preset
    on_cpu, name = layout.context.device.type == "cpu", layout.options.strategy
    if version < "2.10" and (preset.tensor or (preset.pipeline and on_cpu)):
        yield f"--strategy {name} requires PyTorch 2.10 or newer; this is {version}"
    elif version < "2.7" and preset.sharded and on_cpu:
        yield f"--strategy {name} requires PyTorch 2.7 or newer on the CPU; this is {version}"


def _size_problems(layout: Layout) -> Iterator[str]:
    """Problems with the number of ranks; of each strategy, the one that its options allow."""
    name, preset, dims = layout.options.strategy, layout.preset, layout.dims
    world = layout.context.world_size
    if world % dims.cp:
        yield _indivisible("--context-parallel", dims.cp, world)
    elif preset == Preset() and world > 1:
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
            f"--strategy tp shares one model among all {world} ranks, which conflicts with "
            f"--tensor-parallel {dims.tp}: remove that option, or choose tp-dp or fsdp-tp"
        )
    elif name == "pp" and dims.pp != world:
        yield (
            f"--strategy pp is one pipeline over all {world} rank(s), which conflicts with "
            f"--pipeline-parallel {dims.pp}: remove that option, or use pp-dp for several pipelines"
        )
    elif preset.pipeline and name != "pp":
        yield from _pipelines_problems(layout)
    elif preset.tensor and world // dims.cp % dims.tp:
        yield _indivisible("--tensor-parallel", dims.tp, world, cp=dims.cp)
    elif dims.ranks != world:  # hsdp
        yield _indivisible("--shard-ranks", dims.dp_shard, world, cp=dims.cp, tp=dims.tp)


def _indivisible(flag: str, size: int, world: int, **inner: int) -> str:
    """That a size does not divide the ranks, outside of those of `inner` dimensions."""
    outside = " and ".join(f"{size} for {name}" for name, size in inner.items() if size > 1)
    rest = world // math.prod(inner.values())
    return (
        f"{flag} {size} does not divide the {rest} ranks{' left after ' * bool(outside)}{outside}: "
        f"use one of {divisors(rest)}"
    )


def _pipelines_problems(layout: Layout) -> Iterator[str]:
    """Problems with the number of ranks where a pipeline is one of several dimensions."""
    name, preset, dims = layout.options.strategy, layout.preset, layout.dims
    world = layout.context.world_size
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


def _schedule_problems(layout: Layout) -> Iterator[str]:
    """Problems with schedule, micro-batches and stages of a pipeline."""
    name, stages, ranks = layout.schedule, layout.stages_per_rank, layout.dims.pp
    micro_batches = layout.options.micro_batches
    interleaved = name == "interleaved"
    if interleaved != (stages > 1):
        yield (
            f"--stages-per-rank {stages} conflicts with --schedule {name}: only "
            "interleaved has several stages per rank, and requires at least 2"
        )
    if interleaved and ranks == 1:
        yield "--schedule interleaved requires at least two ranks: use 1f1b, or start more ranks"
    if interleaved and micro_batches % ranks:
        yield (
            f"--schedule interleaved requires --micro-batches to be a multiple of {ranks}, the "
            f"ranks per pipeline, not {micro_batches}: {4 * ranks} is a good value"
        )
    if name == "1f1b" and micro_batches < ranks:
        yield (
            f"--schedule 1f1b requires --micro-batches of at least {ranks}, the number of stages, "
            f"not {micro_batches}, or ranks stay idle: {4 * ranks} is a good value"
        )


def _ddp_problems(layout: Layout) -> Iterator[str]:
    options = layout.options
    if options.compress == "bf16" and layout.context.device.type != "cuda":
        yield "--compress bf16 requires GPUs (NCCL 2.10 or later); fp16 works with gloo"
    if options.static_graph and options.micro_batches > 1 and not options.reduce_each:
        yield (
            "--static-graph requires gradients to be reduced in every backward pass, but with "
            "--micro-batches above 1 only the last pass reduces them: remove one of the two "
            "options, or add --reduce-each"
        )


def _sequence_problems(options: TrainOptions, parts: int) -> Iterator[str]:
    """Why the sequences of our tasks cannot be divided into so many parts."""
    if options.compile:
        yield "--context-parallel and --compile cannot be combined: remove one of them"
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
            yield "--sequence-parallel: include it in your task's plan, Task.tensor_parallel"
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
            f"--sequence-parallel requires --sequence to be a multiple of {parts}, not "
            f"{options.sequence}: choose --sequence {longer}"
        )
