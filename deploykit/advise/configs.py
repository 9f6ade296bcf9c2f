"""Every configuration that a cluster allows for a model and a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from deploykit.advise.model_shape import Model
from deploykit.advise.workload import Cluster, ParallelConfig, Strategy, Training

STRATEGIES: dict[Strategy, str] = {
    "single": "one process",
    "dp": "nn.DataParallel: one process drives all GPUs of a node",
    "manual": "gradients averaged by a plain all_reduce; for teaching",
    "ddp": "every GPU holds the whole model; gradients are averaged",
    "zero1": "ddp with optimizer states sharded over the GPUs",
    "zero2": "optimizer states and gradients sharded; weights gathered once a step",
    "zero3": "weights, gradients and optimizer states sharded; each layer gathered when it is used",
    "hsdp": "zero3 inside a node, replicated across nodes, which average gradients",
    "tp": "every layer split over the GPUs (tensor parallelism)",
    "pp": "layers divided into stages, one per GPU (pipeline parallelism)",
    "tp-dp": "tensor parallelism inside a node; replicas average gradients",
    "pp-dp": "replicated pipelines that average gradients",
    "fsdp-tp": "tensor parallelism inside a node, sharding across nodes",
}
"""In order of simplicity, each with a description."""
FOR_TEACHING = frozenset({"dp", "manual"})
"""Never recommended: ddp does the same, faster."""
_MOST_MICRO_BATCHES = 64


def configs(model: Model, training: Training, cluster: Cluster) -> Iterator[ParallelConfig]:
    """Yield all of them, with each number of micro-batches, checkpointing and offload."""
    for strategy in STRATEGIES:
        for degrees in _degrees(strategy, model, training, cluster):
            yield from _with_micro_batches(training, degrees)


def _degrees(
    strategy: Strategy, model: Model, training: Training, cluster: Cluster
) -> Iterator[ParallelConfig]:
    world, node = cluster.world, cluster.gpus_per_node
    if strategy == "single":
        yield ParallelConfig("single")
    elif strategy == "dp":
        if node > 1 and not cluster.gpu.is_cpu:
            yield ParallelConfig("dp", data=node)
    elif strategy in {"ddp", "manual", "zero1"} and world > 1:
        yield ParallelConfig(strategy, data=world)
    elif strategy in {"zero2", "zero3"} and (world > 1 or strategy == "zero3"):
        yield ParallelConfig(strategy, data=world, shards=world)
    elif strategy == "hsdp" and cluster.nodes > 1 and node > 1:
        yield ParallelConfig("hsdp", data=world, shards=node)
    elif strategy in {"tp", "tp-dp", "fsdp-tp"}:
        yield from _tensor_parallel(strategy, model, training, cluster)
    elif strategy in {"pp", "pp-dp"}:
        yield from _pipeline_parallel(strategy, model, world)


def _tensor_parallel(
    strategy: Strategy, model: Model, training: Training, cluster: Cluster
) -> Iterator[ParallelConfig]:
    """Tensor parallelism, over ranks of one node that divide heads and MLP.

    Only `tp` alone may span nodes, since it has no other degree to use them with.
    """
    world = cluster.world
    if strategy == "tp":
        if world > 1 and _divides(world, model, training):
            yield ParallelConfig("tp", tensor=world)
        return
    for tensor in _divisors(cluster.gpus_per_node):
        if 1 < tensor < world and _divides(tensor, model, training):
            data = world // tensor
            yield ParallelConfig(
                strategy,
                data=data,
                tensor=tensor,
                shards=data if strategy == "fsdp-tp" else 1,
            )


def _divides(tensor: int, model: Model, training: Training) -> bool:
    """Whether `tensor` divides the heads, the MLP and, for sequence parallelism, the sequence."""
    return not any(size % tensor for size in (model.heads, model.feedforward, training.sequence))


def _pipeline_parallel(strategy: Strategy, model: Model, world: int) -> Iterator[ParallelConfig]:
    for pipeline in _divisors(world):
        alone = pipeline == world
        if pipeline > 1 and pipeline <= model.layers and alone == (strategy == "pp"):
            yield ParallelConfig(strategy, data=world // pipeline, pipeline=pipeline)


def _with_micro_batches(training: Training, degrees: ParallelConfig) -> Iterator[ParallelConfig]:
    """The configuration with each number of micro-batches that divides a rank's samples."""
    if training.batch % degrees.data:
        return
    checkpointing = _choices(training.checkpointing)
    offload = _choices(training.offload) if degrees.strategy == "zero3" else (False,)
    for micro_batches in _divisors(training.batch // degrees.data):
        if micro_batches < degrees.pipeline:
            continue  # Schedule1F1B raises ValueError: fewer micro-batches than stages
        if micro_batches > _MOST_MICRO_BATCHES * degrees.pipeline:
            break
        for recompute in checkpointing:
            for offloaded in offload:
                yield dataclasses.replace(
                    degrees, micro_batches=micro_batches, checkpointing=recompute, offload=offloaded
                )


def _choices(choice: bool | None) -> tuple[bool, ...]:  # noqa: FBT001 - a three-valued option
    return (False, True) if choice is None else (choice,)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
