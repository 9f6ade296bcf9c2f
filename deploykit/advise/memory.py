"""Memory of one GPU for a configuration: that of the rank with the largest total.

Every part has its own formula and source. `tests/advise` compares them with what torch allocates:
parameters, gradients and optimizer states within 5%, activations within 20%.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from deploykit.advise import activations
from deploykit.advise.model_shape import Layer, Model
from deploykit.advise.workload import (
    COMPUTE_BYTES,
    FULLY_SHARDED,
    KEPT_GATHERED,
    WEIGHT_BYTES,
    ParallelConfig,
    Training,
)

_GIB = 1024**3
_CONTEXT = _GIB
"""Bytes of the CUDA context with its kernels, cuBLAS's workspaces (32 MiB on Hopper, see
https://docs.pytorch.org/docs/stable/notes/cuda.html) and NCCL's buffers. An estimate, not
measured."""
_FRAGMENTED = 0.05
"""Share of a GPU's memory that the caching allocator loses to fragmentation. An estimate."""
_STATES = {"adamw": 2, "sgd": 0, "sgd-momentum": 1}
"""Tensors that an optimizer keeps for each weight, in the weight's precision
(https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html, ...SGD.html)."""
_LORA_RANK = 16
"""Rank of LoRA's matrices, a common choice; small ranks are enough
(https://arxiv.org/abs/2106.09685, section 7.2)."""
_REDUCED_BYTES = 4
"""Gradients are reduced in fp32, so that results do not depend on the configuration."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, by purpose; `host` are bytes in the memory of the node instead."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: tuple[tuple[str, int], ...]
    reserve: int
    host: int = 0

    @property
    def working(self) -> int:
        """Bytes of all buffers."""
        return sum(size for _, size in self.buffers)

    @property
    def total(self) -> int:
        """Bytes of everything on the GPU."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.working + self.reserve


@dataclass(frozen=True)
class Stage:
    """The layers of one pipeline stage; all layers if there is no pipeline."""

    index: int
    blocks: int
    first: bool
    last: bool

    def layers(self, model: Model) -> Iterator[tuple[int, Layer]]:
        """Yield each distinct layer with its count."""
        if self.first:
            yield 1, model.embedding
        yield self.blocks, model.block
        if self.last:
            yield 1, model.head

    def size(self, model: Model, tensor: int, shards: int) -> int:
        """Parameters on one rank, of `tensor` x `shards`."""
        return sum(count * layer.size(tensor, shards) for count, layer in self.layers(model))

    def adapters(self, model: Model, config: ParallelConfig) -> int:
        """Weights of LoRA's two matrices beside each matrix of the blocks, before sharding."""
        return int(self.blocks * model.block.edges(config.tensor) * _LORA_RANK)


def memory(model: Model, training: Training, config: ParallelConfig, capacity: int) -> Memory:
    """The memory of the rank with the largest total, on a GPU with `capacity` bytes."""
    by_stage = (
        rank_memory(model, training, config, stage) for stage in stages(model, config.pipeline)
    )
    largest = max(by_stage, key=lambda each: each.total)
    return dataclasses.replace(largest, reserve=_CONTEXT + int(_FRAGMENTED * capacity))


def stages(model: Model, pipeline: int) -> Iterator[Stage]:
    """The stages of a pipeline, with equal numbers of blocks; the first ones get the remainder."""
    each, remainder = divmod(model.layers, pipeline)
    for index in range(pipeline):
        blocks = each + (index < remainder)
        yield Stage(index, blocks, first=index == 0, last=index == pipeline - 1)


def rank_memory(model: Model, training: Training, config: ParallelConfig, stage: Stage) -> Memory:
    """The memory of a rank of this stage, without the reserve.

    An upper bound: all gradients are assumed to be allocated when activations peak, which is the
    case from the second micro-batch on.
    """
    weight = WEIGHT_BYTES[training.precision]
    size = _held(model, config, stage)
    trained, frozen = _trained(model, config, stage, size)
    states = _STATES[training.optimizer] * weight * _optimized(model, config, trained)
    kept = activations.of_stage(model, training, config, stage.blocks, stage.index)
    copies = _copies(model, training, config, stage)
    logits = activations.of_logits(model, training, config) if stage.last else 0
    # while a block is recomputed, the logits and the copies of the weights are freed already
    recomputed = activations.recomputed(model, training, config)
    freed = logits + copies
    rank = Memory(
        parameters=trained * weight + frozen * COMPUTE_BYTES[training.precision],
        gradients=weight * _gradients(model, training, config, stage, trained),
        optimizer=states,
        activations=kept + max(0, recomputed - freed),
        logits=logits,
        buffers=tuple(_buffers(model, training, config, stage)),
        reserve=0,
    )
    return _offloaded(rank) if config.offload else rank


def _held(model: Model, config: ParallelConfig, stage: Stage) -> int:
    """Weights on this rank. A sharded table is divided by rows, the rest replicated."""
    if config.strategy != "sharded-table":
        return stage.size(model, config.tensor, config.shards)
    table = model.embedding.size()
    return model.parameters - table + model.embedding.size(1, config.data)


def _trained(model: Model, config: ParallelConfig, stage: Stage, size: int) -> tuple[int, int]:
    """Weights with gradients and states, and frozen ones, which LoRA keeps in 16 bits."""
    if not config.lora:
        return size, 0
    return stage.adapters(model, config) // config.shards, size


def _gradients(
    model: Model, training: Training, config: ParallelConfig, stage: Stage, trained: int
) -> int:
    """Elements of the gradients; a sharded table has those of the rows looked up, and their
    indices.
    """
    if config.strategy == "sharded-table":
        rows = 2 * training.tokens // config.data * model.width
        return model.parameters - model.embedding.size() + rows
    return trained + (0 if config.lora else _whole_gradient(model, config, stage))


def _whole_gradient(model: Model, config: ParallelConfig, stage: Stage) -> int:
    """Elements by which a gradient exceeds its weight.

    DTensor keeps the gradient of an embedding that is split over the vocabulary whole on every
    rank (observed with torch 2.13).
    """
    if config.tensor == 1 or not stage.first or config.strategy in FULLY_SHARDED:
        return 0
    return model.embedding.size() - model.embedding.size(config.tensor)


def _optimized(model: Model, config: ParallelConfig, size: int) -> int:
    """Weights whose optimizer states this rank keeps: only its share under ZeRO-1
    (https://arxiv.org/abs/1910.02054, section 5.1).
    """
    if config.strategy != "zero1" or config.lora:
        return size
    return _largest_share(model, config.data)


@functools.lru_cache(maxsize=64)
def _largest_share(model: Model, ranks: int) -> int:
    """The largest share: ZeroRedundancyOptimizer assigns whole tensors, the largest first, each to
    the rank with the fewest elements (https://docs.pytorch.org/docs/stable/distributed.optim.html).
    """
    shares = [0] * ranks
    for size in sorted((tensor.size for tensor in model.tensors()), reverse=True):
        heapq.heapreplace(shares, shares[0] + size)
    return max(shares)


def _offloaded(rank: Memory) -> Memory:
    """FSDP2's CPUOffloadPolicy keeps sharded states in host memory
    (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
    """
    host = rank.parameters + rank.gradients + rank.optimizer
    return dataclasses.replace(rank, parameters=0, gradients=0, optimizer=0, host=host)


def _buffers(
    model: Model, training: Training, config: ParallelConfig, stage: Stage
) -> Iterator[tuple[str, int]]:
    """Other buffers that exist while a step runs.

    DistributedDataParallel's buckets do not count: its gradients are views of them
    (gradient_as_bucket_view, as in the reference trainer; otherwise they are a second copy,
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
    """
    size = stage.size(model, config.tensor, 1)
    if config.strategy == "dp":
        yield "gradients of the replicas", size * WEIGHT_BYTES[training.precision]
    if config.strategy in FULLY_SHARDED:
        yield from _gathered(model, training, config, stage)
    elif copies := _copies(model, training, config, stage):
        yield "16-bit copies of the weights", copies
    if config.pipeline > 1:
        message = activations.of_boundary(model, training, config)
        yield "pipeline messages", 4 * message  # in and out, forward and backward


def _copies(model: Model, training: Training, config: ParallelConfig, stage: Stage) -> int:
    """Bytes of the weights as autocast casts them, kept for the backward pass
    (https://docs.pytorch.org/docs/stable/amp.html). In a pipeline each micro-batch in flight has
    its own copy, unless its blocks are recomputed.
    """
    if not activations.casts_weights(training, config):
        return 0
    again = config.checkpointing or config.selective
    kept = 1 if again else activations.in_flight(config, stage.index)
    layers = stage.layers(model)
    return 2 * kept * sum(count * _matrices(layer, config.tensor) for count, layer in layers)


def _matrices(layer: Layer, tensor: int) -> int:
    """Elements of the weights that autocast casts: all matrices but the embedding's."""
    if layer.name == "embedding":
        return 0
    return sum(each.local(tensor) for each in layer.tensors if len(each.shape) > 1)


def _gathered(
    model: Model, training: Training, config: ParallelConfig, stage: Stage
) -> Iterator[tuple[str, int]]:
    """FSDP2's working set (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).

    With reshard_after_forward=False (ZeRO-2, pipelines) every layer stays gathered. Otherwise the
    current layer, the next one, and the flat buffer of its all-gather are allocated. The backward
    pass adds the unsharded gradients of a layer and the flat buffer of their reduce-scatter. With
    several micro-batches gradients are reduced only after the last one
    (set_requires_gradient_sync), and until then every rank keeps them unsharded.
    """
    largest = max(layer.size(config.tensor) for _, layer in stage.layers(model))
    compute = COMPUTE_BYTES[training.precision]
    whole = stage.size(model, config.tensor, 1)
    always = config.strategy in KEPT_GATHERED
    kept = whole + largest if always else min(3 * largest, whole + largest)
    yield "gathered weights", kept * compute
    if config.lora:
        return
    yield "gradients being reduced", largest * (compute + _REDUCED_BYTES)
    if config.micro_batches > 1:
        yield "unsharded gradients between micro-batches", whole * _REDUCED_BYTES
