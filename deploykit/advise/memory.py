"""Bytes that one GPU needs for a layout: those of the rank that needs most.

Every part has its own formula and source. `tests/advise` holds parameters, gradients and optimizer
states to what torch allocates within 5%, activations within 20%.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from deploykit.advise import activations
from deploykit.advise.plan import (
    COMPUTE_BYTES,
    FULLY_SHARDED,
    WEIGHT_BYTES,
    Layout,
    Training,
)
from deploykit.advise.shape import Layer, Model

_GIB = 1024**3
_CONTEXT = _GIB
"""The CUDA context with its kernels, cuBLAS's workspaces (32 MiB on Hopper, see
https://docs.pytorch.org/docs/stable/notes/cuda.html) and NCCL's buffers. An estimate: not measured
here."""
_FRAGMENTED = 0.05
"""Share of a GPU's memory that the caching allocator cannot give out in one piece. An estimate."""
_STATES = {"adamw": 2, "sgd": 0, "sgd-momentum": 1}
"""Tensors that an optimizer keeps for each weight, in the weight's precision
(https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html, ...SGD.html)."""
_REDUCED_BYTES = 4
"""Gradients are summed over ranks in fp32, so that numbers do not depend on the layout."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, by what they are for; `host` is beside them, in the node's memory."""

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
        """All buffers."""
        return sum(size for _, size in self.buffers)

    @property
    def total(self) -> int:
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.working + self.reserve


@dataclass(frozen=True)
class Stage:
    """The layers of one pipeline stage; without a pipeline, all of them."""

    index: int
    blocks: int
    first: bool
    last: bool

    def layers(self, model: Model) -> Iterator[tuple[int, Layer]]:
        """Each different layer with how often it is there."""
        if self.first:
            yield 1, model.embedding
        yield self.blocks, model.block
        if self.last:
            yield 1, model.head

    def size(self, model: Model, tensor: int, shards: int) -> int:
        """Parameters on one rank."""
        return sum(count * layer.size(tensor, shards) for count, layer in self.layers(model))


def memory(model: Model, training: Training, layout: Layout, capacity: int) -> Memory:
    """What the rank that needs most needs, on a GPU with `capacity` bytes."""
    found = (
        rank_memory(model, training, layout, stage) for stage in stages(model, layout.pipeline)
    )
    most = max(found, key=lambda each: each.total)
    return dataclasses.replace(most, reserve=_CONTEXT + int(_FRAGMENTED * capacity))


def stages(model: Model, pipeline: int) -> Iterator[Stage]:
    """The stages of a pipeline: blocks dealt out evenly, the first stages get those left over."""
    each, more = divmod(model.layers, pipeline)
    for index in range(pipeline):
        blocks = each + (index < more)
        yield Stage(index, blocks, first=index == 0, last=index == pipeline - 1)


def rank_memory(model: Model, training: Training, layout: Layout, stage: Stage) -> Memory:
    """What a rank of this stage needs, without the reserve.

    An upper bound: gradients count as if all were there at the moment with most activations, which
    is so from the second micro-batch on.
    """
    weight = WEIGHT_BYTES[training.precision]
    size = stage.size(model, layout.tensor, layout.shards)
    states = _STATES[training.optimizer] * weight * _optimized(model, layout, size)
    kept = activations.of_stage(model, training, layout, stage.blocks, stage.index)
    copies = _copies(model, training, layout, stage)
    logits = activations.of_logits(model, training, layout) if stage.last else 0
    # when a block is recomputed, the logits are gone, and the copies of the weights too
    again = activations.recomputed(model, training, layout)
    beside = logits + copies
    here = Memory(
        parameters=size * weight,
        gradients=weight * (size + _whole_gradient(model, layout, stage)),
        optimizer=states,
        activations=kept + max(0, again - beside),
        logits=logits,
        buffers=tuple(_buffers(model, training, layout, stage)),
        reserve=0,
    )
    return _offloaded(here) if layout.offload else here


def _whole_gradient(model: Model, layout: Layout, stage: Stage) -> int:
    """What a gradient has more than its weight: DTensor leaves that of an embedding, which is split
    over the vocabulary, whole on every rank (seen with torch 2.13).
    """
    if layout.tensor == 1 or not stage.first or layout.strategy == "fsdp-tp":
        return 0
    return model.embedding.size() - model.embedding.size(layout.tensor)


def _optimized(model: Model, layout: Layout, size: int) -> int:
    """Weights whose optimizer states this rank keeps: under ZeRO-1, its share only
    (https://arxiv.org/abs/1910.02054, section 5.1).
    """
    return _largest_share(model, layout.data) if layout.strategy == "zero1" else size


@functools.lru_cache(maxsize=64)
def _largest_share(model: Model, ranks: int) -> int:
    """ZeroRedundancyOptimizer hands out whole tensors, the largest first, each to the rank that
    has least (https://docs.pytorch.org/docs/stable/distributed.optim.html).
    """
    shares = [0] * ranks
    for size in sorted((tensor.size for tensor in model.tensors()), reverse=True):
        heapq.heapreplace(shares, shares[0] + size)
    return max(shares)


def _offloaded(here: Memory) -> Memory:
    """FSDP2's CPUOffloadPolicy: sharded states live in the host's memory
    (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
    """
    host = here.parameters + here.gradients + here.optimizer
    return dataclasses.replace(here, parameters=0, gradients=0, optimizer=0, host=host)


def _buffers(
    model: Model, training: Training, layout: Layout, stage: Stage
) -> Iterator[tuple[str, int]]:
    """What is there beside states and activations while a step runs.

    DistributedDataParallel's buckets are no more: its gradients are views of them
    (gradient_as_bucket_view, as in the reference trainer; otherwise they are a second copy,
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
    """
    size = stage.size(model, layout.tensor, 1)
    if layout.strategy == "dp":
        yield "gradients of the replicas", size * WEIGHT_BYTES[training.precision]
    if layout.strategy in FULLY_SHARDED:
        yield from _gathered(model, training, layout, stage)
    elif copies := _copies(model, training, layout, stage):
        yield "16-bit copies of the weights", copies
    if layout.pipeline > 1:
        message = activations.of_boundary(model, training, layout)
        yield "pipeline messages", 4 * message  # in and out, forward and backward


def _copies(model: Model, training: Training, layout: Layout, stage: Stage) -> int:
    """Bytes of the weights as autocast casts them: kept until it is left, and for the backward pass
    (https://docs.pytorch.org/docs/stable/amp.html). In a pipeline each micro-batch that is under
    way has its own, unless its blocks are recomputed.
    """
    if not activations.casts_weights(training, layout):
        return 0
    kept = 1 if layout.checkpointing else activations.under_way(layout, stage.index)
    layers = stage.layers(model)
    return 2 * kept * sum(count * _matrices(layer, layout.tensor) for count, layer in layers)


def _matrices(layer: Layer, tensor: int) -> int:
    """Elements of the weights that autocast casts: matrices, but not an embedding's."""
    if layer.name == "embedding":
        return 0
    return sum(each.local(tensor) for each in layer.tensors if len(each.shape) > 1)


def _gathered(
    model: Model, training: Training, layout: Layout, stage: Stage
) -> Iterator[tuple[str, int]]:
    """FSDP2's working set (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).

    With reshard_after_forward=False (ZeRO-2) every layer stays gathered. Otherwise there are the
    layer at work, the next one, and the flat buffer of the gather that fills it. The backward pass
    adds the whole gradients of a layer and the flat buffer in which they are reduced. With several
    micro-batches gradients are reduced after the last one only (set_requires_gradient_sync), and
    until then every rank keeps them whole.
    """
    largest = max(layer.size(layout.tensor) for _, layer in stage.layers(model))
    compute = COMPUTE_BYTES[training.precision]
    whole = stage.size(model, layout.tensor, 1)
    kept = whole + largest if layout.strategy == "zero2" else min(3 * largest, whole + largest)
    yield "gathered weights", kept * compute
    yield "gradients on their way", largest * (compute + _REDUCED_BYTES)
    if layout.micro_batches > 1:
        yield "whole gradients between micro-batches", whole * _REDUCED_BYTES
