"""Memory of one GPU for a configuration: that of the rank with the largest total.

Every part has its own formula and source. `tests/advise` compares them with what torch allocates:
parameters, gradients and optimizer states within 5%, activations within 20%.

Activations are those that a rank keeps from the forward to the backward pass, counted tensor by
tensor for the reference trainer's block, as Korthikanti et al. do for theirs
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

_STATISTIC_BYTES = 4
"""Of a mean, a standard deviation or a log-sum-exp, which stay in fp32."""
_INDEX_BYTES = 8
_LOGIT_BYTES = 4
_LOSS_COPIES = {False: 3, True: 2}
"""Tensors as large as the logits while the loss is differentiated: the log-probabilities, their
gradient and that of the logits. torch.compile (True) fuses the first two."""
_SPLIT_LOSS_COPIES = 4
"""With loss_parallel, which takes separate steps: the log-probabilities, their exponential, the
mask of the targets, and the sum of these two (torch/distributed/tensor/parallel/loss.py)."""
_CONTEXT_BYTES = 1024**3
"""Of the CUDA context with its kernels, cuBLAS's workspaces (32 MiB on Hopper, see
https://docs.pytorch.org/docs/stable/notes/cuda.html) and NCCL's buffers. An estimate, not
measured."""
_FRAGMENTED_SHARE = 0.05
"""Share of a GPU's memory that the caching allocator loses to fragmentation. An estimate."""
_STATES = {"adamw": 2, "sgd": 0, "sgd-momentum": 1}
"""Tensors that an optimizer keeps for each weight, in the weight's precision
(https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html, ...SGD.html)."""
_LORA_RANK = 16
"""Rank of LoRA's matrices, a common choice; small ranks are enough
(https://arxiv.org/abs/2106.09685, section 7.2)."""
REDUCED_BYTES = 4
"""Gradients are reduced in fp32, so that results do not depend on the configuration."""


@dataclass(frozen=True)
class Activations:
    """Activations of a rank, in bytes."""

    model: Model
    training: Training
    config: ParallelConfig

    def of_stage(self, blocks: int, stage: int) -> int:
        """`blocks` blocks on a pipeline stage, with all micro-batches in flight there.

        With checkpointing a block keeps only its input, with selective checkpointing also the
        outputs of attention and of every other product, as torchtitan does by operator: query,
        value, the MLP's first and last.
        """
        config, model = self.config, self.model
        if model.sample is not None:
            return self.in_flight(stage) * self._sampled(model.sample)
        if config.checkpointing:
            block: float = self._residual
        elif config.selective:
            outputs = (3 + model.kv_share) * model.width + model.feedforward
            statistics = model.heads * _STATISTIC_BYTES
            block = self._residual + (outputs * self._size + statistics) / config.tensor
        else:
            block = self._block
        kept = int(self.in_flight(stage) * blocks * self.micro_tokens * block)
        # the token's index; the head's norm and Linear, whose input tensor parallelism gathers
        head = self._norm_input + model.width * self._size
        last = stage == config.pipeline - 1
        ends = (stage == 0) * _INDEX_BYTES + last * (head + 2 * _STATISTIC_BYTES + _INDEX_BYTES)
        return kept + self.micro_tokens * int(ends)

    def in_flight(self, stage: int) -> int:
        """Micro-batches between their forward and backward passes on stage i of p: up to p - i in
        the 1F1B schedule (https://arxiv.org/abs/2104.04473, section 2.2).
        """
        return min(self.config.micro_batches, self.config.pipeline - stage)

    @property
    def recomputed(self) -> int:
        """A checkpointed block while its backward pass runs.

        It is what the block would keep without checkpointing, the gradient of its output, and that
        of the MLP's inner tensor.
        """
        config, model = self.config, self.model
        if model.sample is not None:
            return config.checkpointing * self._sampled(model.sample)
        gradients = (model.width + model.feedforward) * self._size / config.tensor
        again = config.checkpointing or config.selective
        return int(again * self.micro_tokens * (self._block + gradients))

    @property
    def logits(self) -> int:
        """The peak of the logits of one micro-batch and of their copies in the loss.

        Cross-entropy is computed in fp32, as autocast does
        (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). nn.DataParallel
        collects the logits of all GPUs on the first one. Tensor parallelism with `loss_parallel`
        splits them.
        """
        share = self.config.data if self.config.strategy == "dp" else 1
        copies: float = _LOSS_COPIES[self.training.compiled]
        if self.config.tensor > 1 and self.training.loss_parallel:
            copies = _SPLIT_LOSS_COPIES / self.config.tensor
        return int(share * self.micro_tokens * self.model.vocabulary * _LOGIT_BYTES * copies)

    @property
    def boundary(self) -> int:
        """The tensor that one micro-batch passes from one layer to the next."""
        return int(self.micro_tokens * self._residual)

    @property
    def micro_tokens(self) -> int:
        """Tokens (not bytes) of one micro-batch on one rank, rounded up."""
        return -(-self.training.tokens // (self.config.data * self.config.micro_batches))

    @property
    def casts_weights(self) -> bool:
        """Whether torch.autocast casts the weights; fully_shard gathers them in 16 bits instead."""
        sharded = self.config.strategy in FULLY_SHARDED
        return self._is_autocast and not sharded and not self.config.lora

    @property
    def _size(self) -> int:
        return COMPUTE_BYTES[self.training.precision]

    @property
    def _is_autocast(self) -> bool:
        return self.training.precision in {"bf16", "fp16"}

    @property
    def _block(self) -> int:
        """One block per token, on one of `config.tensor` ranks.

        Tensors of the model's width: 2 inputs of the norms; 2 inputs of query, key and value and of
        the MLP's first layer (4 under autocast, since each Linear casts the fp32 output of a norm);
        4 for query, key, value and the attention's output. Tensors of the MLP's width: 2 around the
        GELU, or 4 of a gated MLP (both products, the activation, and what is multiplied). Tensor
        parallelism with sequence parallelism splits all but the inputs of the column-wise layers,
        which DTensor gathers and keeps whole.
        """
        model, tensor = self.model, self.config.tensor
        copies = 4 if self._wide_norms else 2
        around = 4 if model.gated else 2
        inner = (4 * model.width + around * model.feedforward) * self._size / tensor
        statistics = (4 + model.heads) * _STATISTIC_BYTES / tensor
        return int(2 * self._norm_input + copies * model.width * self._size + inner + statistics)

    @property
    def _wide_norms(self) -> bool:
        """Whether norms return fp32: under autocast on a GPU always, on a CPU if their input is
        fp32 (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference).
        """
        gathered = self.config.strategy in FULLY_SHARDED
        return self._is_autocast and not (self.training.on_cpu and gathered)

    @property
    def _norm_input(self) -> float:
        """The input of a norm per token."""
        return self.model.width * (4 if self._wide_norms else self._size) / self.config.tensor

    @property
    def _residual(self) -> float:
        """The residual stream per token, in the precision of the embedding's weights."""
        return self.model.width * (4 if self.casts_weights else self._size) / self.config.tensor

    def _sampled(self, sample: Sample) -> int:
        """A micro-batch of a counted model; with checkpointing one layer's worth."""
        config = self.config
        share = self.training.batch / (config.data * config.micro_batches * config.pipeline)
        layers = max(1, self.model.layers) if config.checkpointing else 1
        return int(share * sample.saved * self._size / layers)


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
        return sum(size for _, size in self.parts)

    @property
    def parts(self) -> list[tuple[str, int]]:
        """The parts of a GPU's memory, each with its bytes."""
        return [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer states", self.optimizer),
            ("activations", self.activations),
            ("logits", self.logits),
            *self.buffers,
            ("reserve", self.reserve),
        ]


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
    largest = max(by_stage, key=lambda rank: rank.total)
    return dataclasses.replace(largest, reserve=_CONTEXT_BYTES + int(_FRAGMENTED_SHARE * capacity))


def stages(model: Model, pipeline: int) -> Iterator[Stage]:
    """The stages of a pipeline, with equal numbers of blocks; the first ones get the remainder."""
    equal, remainder = divmod(model.layers, pipeline)
    for index in range(pipeline):
        blocks = equal + (index < remainder)
        yield Stage(index, blocks, first=index == 0, last=index == pipeline - 1)


def rank_memory(model: Model, training: Training, config: ParallelConfig, stage: Stage) -> Memory:
    """The memory of a rank of this stage, without the reserve.

    An upper bound: all gradients are assumed to be allocated when activations peak, which is the
    case from the second micro-batch on. `sharded-table` divides the table by rows and replicates
    the rest; its gradients are those of the rows looked up, with their indices. LoRA keeps frozen
    weights in 16 bits. FSDP2's CPUOffloadPolicy keeps sharded states in host memory
    (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
    """
    activations = Activations(model, training, config)
    trained, frozen = stage.size(model, config.tensor, config.shards), 0
    gradients = trained
    if config.lora:
        trained, frozen = stage.adapters(model, config) // config.shards, trained
        gradients = trained
    elif config.strategy == "sharded-table":
        dense = model.parameters - model.embedding.size()
        trained = dense + model.embedding.size(1, config.data)
        gradients = dense + 2 * training.tokens // config.data * model.width
    elif config.tensor > 1 and stage.first and config.strategy not in FULLY_SHARDED:
        # DTensor keeps the gradient of an embedding that is split over the vocabulary whole on
        # every rank (observed with torch 2.13)
        gradients += model.embedding.size() - model.embedding.size(config.tensor)
    optimized = trained
    if config.strategy == "zero1" and not config.lora:
        optimized = _largest_share(model, config.data)
    weight = WEIGHT_BYTES[training.precision]
    states = {
        "parameters": trained * weight + frozen * COMPUTE_BYTES[training.precision],
        "gradients": weight * gradients,
        "optimizer": _STATES[training.optimizer] * weight * optimized,
    }
    logits = activations.logits if stage.last else 0
    # while a block is recomputed, the logits and the copies of the weights are freed already
    freed = logits + _copies(activations, stage)
    return Memory(
        **(dict.fromkeys(states, 0) if config.offload else states),
        activations=activations.of_stage(stage.blocks, stage.index)
        + max(0, activations.recomputed - freed),
        logits=logits,
        buffers=tuple(_buffers(activations, stage)),
        reserve=0,
        host=sum(states.values()) if config.offload else 0,
    )


@functools.lru_cache(maxsize=64)
def _largest_share(model: Model, ranks: int) -> int:
    """Weights of which a rank keeps the optimizer states under ZeRO-1, the largest share
    (https://arxiv.org/abs/1910.02054, section 5.1).

    ZeroRedundancyOptimizer assigns whole tensors, the largest first, each to the rank with the
    fewest elements (https://docs.pytorch.org/docs/stable/distributed.optim.html).
    """
    shares = [0] * ranks
    for size in sorted((tensor.size for tensor in model.tensors()), reverse=True):
        heapq.heapreplace(shares, shares[0] + size)
    return max(shares)


def _buffers(activations: Activations, stage: Stage) -> Iterator[tuple[str, int]]:
    """Other buffers that exist while a step runs.

    DistributedDataParallel's buckets do not count: its gradients are views of them
    (gradient_as_bucket_view, as in the reference trainer; otherwise they are a second copy,
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
    """
    config, model = activations.config, activations.model
    if config.strategy == "dp":
        size = stage.size(model, config.tensor, 1)
        yield "gradients of the replicas", size * WEIGHT_BYTES[activations.training.precision]
    if config.strategy in FULLY_SHARDED:
        yield from _gathered(activations, stage)
    elif copies := _copies(activations, stage):
        yield "16-bit copies of the weights", copies
    if config.pipeline > 1:
        yield "pipeline messages", 4 * activations.boundary  # in and out, forward and backward


def _copies(activations: Activations, stage: Stage) -> int:
    """Bytes of the weights as autocast casts them, kept for the backward pass
    (https://docs.pytorch.org/docs/stable/amp.html): all matrices but the embedding's. In a pipeline
    each micro-batch in flight has its own copy, unless its blocks are recomputed.
    """
    config, model = activations.config, activations.model
    if not activations.casts_weights:
        return 0
    again = config.checkpointing or config.selective
    kept = 1 if again else activations.in_flight(stage.index)
    matrices = sum(
        count * layer.matrices(config.tensor)
        for count, layer in stage.layers(model)
        if layer is not model.embedding
    )
    return 2 * kept * matrices


def _gathered(activations: Activations, stage: Stage) -> Iterator[tuple[str, int]]:
    """FSDP2's working set (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).

    With reshard_after_forward=False (ZeRO-2, pipelines) every layer stays gathered. Otherwise the
    current layer, the next one, and the flat buffer of its all-gather are allocated. The backward
    pass adds the unsharded gradients of a layer and the flat buffer of their reduce-scatter. With
    several micro-batches gradients are reduced only after the last one
    (set_requires_gradient_sync), and until then every rank keeps them unsharded.
    """
    config, model = activations.config, activations.model
    largest = max(layer.size(config.tensor) for _, layer in stage.layers(model))
    compute = COMPUTE_BYTES[activations.training.precision]
    whole = stage.size(model, config.tensor, 1)
    always = config.strategy in KEPT_GATHERED
    kept = whole + largest if always else min(3 * largest, whole + largest)
    yield "gathered weights", kept * compute
    if config.lora:
        return
    yield "gradients being reduced", largest * (compute + REDUCED_BYTES)
    if config.micro_batches > 1:
        yield "unsharded gradients between micro-batches", whole * REDUCED_BYTES
