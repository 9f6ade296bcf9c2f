"""Every layout that a cluster allows for a model and a batch: each strategy with its degrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from deploykit.advise.plan import Cluster, Layout, Strategy, Training
from deploykit.advise.shape import Model

STRATEGIES: dict[Strategy, str] = {
    "single": "one process",
    "dp": "nn.DataParallel: one process drives all GPUs of a node",
    "manual": "gradients averaged by a plain all_reduce, to learn from",
    "ddp": "every GPU holds the whole model and averages gradients",
    "zero1": "as ddp, with optimizer states split over the GPUs",
    "zero2": "optimizer states and gradients split; weights gathered once a step",
    "zero3": "everything split over all GPUs; each layer gathered when it is needed",
    "hsdp": "as zero3 inside a node; whole copies on the nodes average gradients",
    "tp": "every layer split over the GPUs",
    "pp": "layers dealt out to the GPUs, which pass activations on",
    "tp-dp": "layers split inside a node; copies average gradients",
    "pp-dp": "pipelines side by side that average gradients",
    "fsdp-tp": "layers split inside a node, and sharded over the rest",
}
"""In order of simplicity, with what each does."""
TAUGHT = frozenset({"dp", "manual"})
"""Never recommended: ddp does the same, better."""
_MOST_MICRO_BATCHES = 64


def layouts(model: Model, training: Training, cluster: Cluster) -> Iterator[Layout]:
    """All of them, with every number of micro-batches and with and without checkpointing."""
    for strategy in STRATEGIES:
        for degrees in _degrees(strategy, model, training, cluster):
            yield from _pieces(training, degrees)


def _degrees(
    strategy: Strategy, model: Model, training: Training, cluster: Cluster
) -> Iterator[Layout]:
    world, node = cluster.world, cluster.gpus_per_node
    if strategy == "single":
        yield Layout("single")
    elif strategy == "dp":
        if node > 1 and not cluster.gpu.is_cpu:
            yield Layout("dp", data=node)
    elif strategy in {"ddp", "manual", "zero1"} and world > 1:
        yield Layout(strategy, data=world)
    elif strategy in {"zero2", "zero3"} and (world > 1 or strategy == "zero3"):
        yield Layout(strategy, data=world, shards=world)
    elif strategy == "hsdp" and cluster.nodes > 1 and node > 1:
        yield Layout("hsdp", data=world, shards=node)
    elif strategy in {"tp", "tp-dp", "fsdp-tp"}:
        yield from _split(strategy, model, training, cluster)
    elif strategy in {"pp", "pp-dp"}:
        yield from _staged(strategy, model, world)


def _split(
    strategy: Strategy, model: Model, training: Training, cluster: Cluster
) -> Iterator[Layout]:
    """Tensor parallelism, over ranks of one node that divide heads and MLP; `tp` alone may span
    nodes, since it has nothing else to fill them with.
    """
    world = cluster.world
    if strategy == "tp":
        if world > 1 and _divides(world, model, training):
            yield Layout("tp", tensor=world)
        return
    for tensor in _divisors(cluster.gpus_per_node):
        if 1 < tensor < world and _divides(tensor, model, training):
            data = world // tensor
            yield Layout(
                strategy,
                data=data,
                tensor=tensor,
                shards=data if strategy == "fsdp-tp" else 1,
            )


def _divides(tensor: int, model: Model, training: Training) -> bool:
    """Whether heads, the MLP and, for sequence parallelism, the sequence can be cut so."""
    return not any(size % tensor for size in (model.heads, model.feedforward, training.sequence))


def _staged(strategy: Strategy, model: Model, world: int) -> Iterator[Layout]:
    for pipeline in _divisors(world):
        alone = pipeline == world
        if pipeline > 1 and pipeline <= model.layers and alone == (strategy == "pp"):
            yield Layout(strategy, data=world // pipeline, pipeline=pipeline)


def _pieces(training: Training, degrees: Layout) -> Iterator[Layout]:
    """A layout with each number of micro-batches into which a rank's samples can be cut."""
    if training.batch % degrees.data:
        return
    checkpointing = _choices(training.checkpointing)
    offload = _choices(training.offload) if degrees.strategy == "zero3" else (False,)
    for pieces in _divisors(training.batch // degrees.data):
        if pieces < degrees.pipeline:
            continue  # Schedule1F1B raises ValueError: fewer micro-batches than stages
        if pieces > _MOST_MICRO_BATCHES * degrees.pipeline:
            break
        for recompute in checkpointing:
            for away in offload:
                yield dataclasses.replace(
                    degrees, micro_batches=pieces, checkpointing=recompute, offload=away
                )


def _choices(wanted: bool | None) -> tuple[bool, ...]:  # noqa: FBT001 - a three-valued option
    return (False, True) if wanted is None else (wanted,)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
