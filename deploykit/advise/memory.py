"""Bytes of activations that one rank keeps from the forward to the backward pass.

Counted tensor by tensor for the reference trainer's block, as Korthikanti et al. do for theirs
(https://arxiv.org/abs/2205.05198, section 4), with two differences: no dropout, and attention by
scaled_dot_product_attention, which keeps no scores
(https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from deploykit.advise.models import Layer, Model, Sample
from deploykit.advise.strategies import (
    COMPUTE_BYTES,
    FULLY_SHARDED,
    KEPT_GATHERED,
    WEIGHT_BYTES,
    ParallelConfig,
    Training,
)

_STATISTIC = 4
"""Bytes of a mean, a standard deviation or a log-sum-exp, which stay in fp32."""
_INDEX = 8
_LOGIT = 4
_LOSS_COPIES = 3
"""Tensors as large as the logits while the loss is differentiated: the log-probabilities, their
gradient and that of the logits. torch.compile fuses the first two."""
_SPLIT_LOSS_COPIES = 4
"""The same under loss_parallel, which takes separate steps: the log-probabilities, their
exponential, the mask of the targets, and the sum of these two
(torch/distributed/tensor/parallel/loss.py)."""


def stage_activations(
    model: Model, training: Training, config: ParallelConfig, blocks: int, stage: int
) -> int:
    """Bytes for `blocks` blocks on a pipeline stage, with all micro-batches in flight there.

    In the 1F1B schedule stage i of p holds up to p - i micro-batches
    (https://arxiv.org/abs/2104.04473, section 2.2). With checkpointing a block keeps only its
    input, with selective checkpointing some outputs more.
    """
    if model.sample is not None:
        return in_flight(config, stage) * _sampled(model, model.sample, training, config)
    tokens = micro_tokens(training, config)
    last = stage == config.pipeline - 1
    each = (
        _residual if config.checkpointing else _selected if config.selective else block_activations
    )
    kept = int(in_flight(config, stage) * blocks * tokens * each(model, training, config))
    return kept + tokens * end_activations(model, training, config, first=stage == 0, last=last)


def in_flight(config: ParallelConfig, stage: int) -> int:
    """Micro-batches of a stage that are between their forward and backward passes."""
    return min(config.micro_batches, config.pipeline - stage)


def recomputed_bytes(model: Model, training: Training, config: ParallelConfig) -> int:
    """Bytes of a checkpointed block while its backward pass runs.

    They are what the block would keep without checkpointing, the gradient of its output, and that
    of the MLP's inner tensor.
    """
    size = COMPUTE_BYTES[training.precision]
    if model.sample is not None:
        return config.checkpointing * _sampled(model, model.sample, training, config)
    gradients = (model.width + model.feedforward) * size / config.tensor
    whole = block_activations(model, training, config) + gradients
    again = config.checkpointing or config.selective
    return int(again * micro_tokens(training, config) * whole)


def micro_tokens(training: Training, config: ParallelConfig) -> int:
    """Tokens of one micro-batch on one rank, rounded up."""
    return -(-training.tokens // (config.data * config.micro_batches))


def block_activations(model: Model, training: Training, config: ParallelConfig) -> int:
    """Bytes of one block per token, on one of `config.tensor` ranks.

    Tensors of the model's width: 2 inputs of the norms; 2 inputs of query, key and value and of
    the MLP's first layer (4 under autocast, since each Linear casts the fp32 output of a norm);
    4 for query, key, value and the attention's output. Tensors of the MLP's width: 2 around the
    GELU, or 4 of a gated MLP (both products, the activation, and what is multiplied). Tensor
    parallelism with sequence parallelism splits all but the inputs of the column-wise layers, which
    DTensor gathers and keeps whole.
    """
    width, size = model.width, COMPUTE_BYTES[training.precision]
    copies = 4 if _wide_norms(training, config) else 2
    norms = 2 * _norm_input(model, training, config)
    around = 4 if model.gated else 2
    inner = (4 * width + around * model.feedforward) * size / config.tensor
    statistics = (4 + model.heads) * _STATISTIC / config.tensor
    return int(norms + copies * width * size + inner + statistics)


def _selected(model: Model, training: Training, config: ParallelConfig) -> float:
    """Bytes per token that a block keeps with selective checkpointing: its input and the outputs of
    attention and of every other product, as torchtitan does by operator: query, value, the MLP's
    first and last.
    """
    kept = (3 + model.kv_share) * model.width + model.feedforward
    statistics = model.heads * _STATISTIC
    rest = (kept * COMPUTE_BYTES[training.precision] + statistics) / config.tensor
    return _residual(model, training, config) + rest


def _sampled(model: Model, sample: Sample, training: Training, config: ParallelConfig) -> int:
    """Bytes that a counted model keeps of a micro-batch; with checkpointing one layer's worth."""
    share = training.batch / (config.data * config.micro_batches * config.pipeline)
    layers = max(1, model.layers) if config.checkpointing else 1
    return int(share * sample.saved * COMPUTE_BYTES[training.precision] / layers)


def casts_weights(training: Training, config: ParallelConfig) -> bool:
    """Whether torch.autocast casts the weights; fully_shard gathers them in 16 bits instead."""
    return _is_autocast(training) and config.strategy not in FULLY_SHARDED and not config.lora


def _is_autocast(training: Training) -> bool:
    return training.precision in {"bf16", "fp16"}


def _wide_norms(training: Training, config: ParallelConfig) -> bool:
    """Whether norms return fp32: under autocast on a GPU always, on a CPU if their input is fp32
    (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference).
    """
    gathered = config.strategy in FULLY_SHARDED
    return _is_autocast(training) and not (training.on_cpu and gathered)


def _norm_input(model: Model, training: Training, config: ParallelConfig) -> float:
    """Bytes per token that a norm keeps of its input."""
    size = 4 if _wide_norms(training, config) else COMPUTE_BYTES[training.precision]
    return model.width * size / config.tensor


def _residual(model: Model, training: Training, config: ParallelConfig) -> float:
    """Bytes per token of the residual stream, in the precision of the embedding's weights."""
    size = 4 if casts_weights(training, config) else COMPUTE_BYTES[training.precision]
    return model.width * size / config.tensor


def end_activations(
    model: Model, training: Training, config: ParallelConfig, *, first: bool, last: bool
) -> int:
    """Bytes per token of the embedding (the token's index) and of the head's norm and Linear.

    Tensor parallelism gathers the input of the head's Linear.
    """
    head = _norm_input(model, training, config) + model.width * COMPUTE_BYTES[training.precision]
    return int(first * _INDEX + last * (head + 2 * _STATISTIC + _INDEX))


def logit_bytes(model: Model, training: Training, config: ParallelConfig) -> int:
    """Peak bytes of the logits of one micro-batch and of their copies in the loss.

    Cross-entropy is computed in fp32, as autocast does
    (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). nn.DataParallel collects
    the logits of all GPUs on the first one. Tensor parallelism with `loss_parallel` splits them.
    """
    share = config.data if config.strategy == "dp" else 1
    copies: float = _LOSS_COPIES - 1 if training.compiled else _LOSS_COPIES
    if config.tensor > 1 and training.loss_parallel:
        copies = _SPLIT_LOSS_COPIES / config.tensor
    logits = share * micro_tokens(training, config) * model.vocabulary * _LOGIT
    return int(logits * copies)


def boundary_bytes(model: Model, training: Training, config: ParallelConfig) -> int:
    """Bytes of the tensor that one micro-batch passes from one layer to the next."""
    return int(micro_tokens(training, config) * _residual(model, training, config))


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
    kept = stage_activations(model, training, config, stage.blocks, stage.index)
    copies = _copies(model, training, config, stage)
    logits = logit_bytes(model, training, config) if stage.last else 0
    # while a block is recomputed, the logits and the copies of the weights are freed already
    recomputed = recomputed_bytes(model, training, config)
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
        message = boundary_bytes(model, training, config)
        yield "pipeline messages", 4 * message  # in and out, forward and backward


def _copies(model: Model, training: Training, config: ParallelConfig, stage: Stage) -> int:
    """Bytes of the weights as autocast casts them, kept for the backward pass
    (https://docs.pytorch.org/docs/stable/amp.html). In a pipeline each micro-batch in flight has
    its own copy, unless its blocks are recomputed.
    """
    if not casts_weights(training, config):
        return 0
    again = config.checkpointing or config.selective
    kept = 1 if again else in_flight(config, stage.index)
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
