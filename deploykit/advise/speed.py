"""Seconds of compute on one GPU: matrix products, attention, and memory traffic.

A step's operations take turns, so their times add up. Products run at the share of the peak that
large ones reach (`matmul` in gpus.toml), attention at that of its kernel (`attention`), and all
else at the speed of the memory: norms, activations and the loss do few operations per byte
(https://arxiv.org/abs/2007.00072, table 1). That is why a narrow model, or a layer that tensor
parallelism makes narrow, reaches a smaller share of the peak: its products shrink with the square
of the width, its traffic with the width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deploykit.advise.gpus import Gpu
from deploykit.advise.memory import boundary_bytes, micro_tokens, stages
from deploykit.advise.models import Model, Sample
from deploykit.advise.strategies import (
    COMPUTE_BYTES,
    FULLY_SHARDED,
    KEPT_GATHERED,
    WEIGHT_BYTES,
    Cluster,
    ParallelConfig,
    Training,
)

_STREAMED = 0.85
"""Share of the memory's bandwidth that simple kernels reach. An estimate."""
_WIDE_PASSES = {(False, False): 20, (False, True): 8, (True, False): 58, (True, True): 12}
"""Times that a tensor of the model's width is read or written in a forward pass outside of
products and attention, by whether the model is a Llama and whether operations are fused, in units
of 16 bits. Two residual sums take 3 each. A LayerNorm is one kernel with an output in 32 bits that
is cast back: 5, and 4 for positions. RMSNorm runs as six kernels in 32 bits: 20, and rotary
positions as three: 12. Fused, a norm takes 2 (with its sum 4), rotary positions 4."""
_INNER_PASSES = {(False, False): 2, (False, True): 2, (True, False): 5, (True, True): 3}
"""The same for tensors of the MLP's inner width, by whether it is gated and fused. GELU reads and
writes one; a gate reads and writes one, then the product reads two and writes one."""
_ATTENTION_PASSES = 4
"""Query, key and value are read and the output is written."""
_SCORE_PASSES = 6
"""Without a fused kernel: the scores are written, read and written by the softmax and by dropout,
and read by the second product."""
_LOGIT_BYTES = {False: 34, True: 14}
"""Bytes of traffic per logit, forward and backward, by whether operations are fused. The product
writes 2 and its two gradients read 4; then a cast to fp32, log-softmax, its gradient and a cast
back: 28, or 8 in one kernel."""
_BACKWARD = 2
"""The backward pass has two products for each one of the forward pass, and twice the traffic."""
_FLASH_BACKWARD = 2.5
"""The same for a fused attention kernel, which computes the scores again
(https://arxiv.org/abs/2307.08691, section 4.1)."""
_RECOMPUTED = 0.4
"""Share of the products that selective checkpointing repeats: torchtitan's policy keeps every
other one (https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/
activation_checkpoint.py); the share of a Llama's weights is 0.36, of a GPT's 0.42."""
_UPDATE_ACCESSES = 7
"""AdamW reads weight, gradient and two states, and writes all but the gradient."""
_CAST_BYTES = 6
"""torch.autocast reads a weight in 32 bits and writes it in 16."""


def peak(training: Training, gpu: Gpu) -> float:
    """Operations per second of the data sheet; those of fp32 if the GPU does not support bf16."""
    name = "bf16" if training.precision == "pure-bf16" else training.precision
    return gpu.flops.get(name) or gpu.flops["fp32"]


def work(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds of compute of one step on one rank, without waiting; an equal share of a pipeline."""
    if model.sample is not None:
        return _sampled(model.sample, training, gpu, config) + _per_step(
            model, training, gpu, config
        )
    tokens = training.tokens / config.data
    block, head = _block(model, training, gpu, config), _head(model, training, gpu, config)
    layers = tokens * (model.layers * block + head) / config.pipeline
    return layers + _per_step(model, training, gpu, config)


def _repeats(config: ParallelConfig) -> float:
    """Products per product of the forward pass: LoRA needs no gradients of frozen weights."""
    again = 1.0 if config.checkpointing else _RECOMPUTED if config.selective else 0.0
    return 1 + again + (_BACKWARD - config.lora)


def _block(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds per token of a block, forward and backward."""
    products = 2 * model.block.matrices() / config.tensor * _repeats(config)
    size = COMPUTE_BYTES[training.precision]
    passes = _elementwise(model, training) / config.tensor
    again = 1 if config.checkpointing or config.selective else 0
    traffic = model.block.edges(config.tensor) * _repeats(config) + passes * (3 + again)
    return (
        products / (peak(training, gpu) * gpu.matmul)
        + _attention(model, training, gpu, config)
        + _streaming(traffic * size, gpu)
    )


def _attention(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds per token of attention: half of the scores where the kernel skips the masked half."""
    forward = 4 * model.width * training.sequence / config.tensor
    again = 1 if config.checkpointing else 0
    if model.flash:
        operations = forward / 2 * (1 + again + _FLASH_BACKWARD)
        return operations / (peak(training, gpu) * gpu.attention)
    scores = model.heads * training.sequence / config.tensor * _SCORE_PASSES
    repeats = 1 + again + _BACKWARD
    traffic = scores * COMPUTE_BYTES[training.precision] * repeats
    return forward * repeats / (peak(training, gpu) * gpu.matmul) + _streaming(traffic, gpu)


def _elementwise(model: Model, training: Training) -> float:
    """Elements per token that a block's forward pass moves outside of products."""
    kind = model.gated, training.compiled
    wide = _WIDE_PASSES[kind] + _ATTENTION_PASSES
    return wide * model.width + _INNER_PASSES[kind] * model.feedforward


def _head(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds per token of the head and the loss."""
    products = 2 * model.head_size * (1 + _BACKWARD) / config.tensor
    split = config.tensor if training.loss_parallel else 1
    traffic = model.vocabulary * _LOGIT_BYTES[training.compiled] / split
    return products / (peak(training, gpu) * gpu.matmul) + _streaming(traffic, gpu)


def _per_step(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds of what is done once a step or once a micro-batch, whatever the number of tokens."""
    weights = model.parameters / (config.tensor * config.pipeline)
    shards = config.data if config.strategy == "zero1" else config.shards
    updated = 0.0 if config.lora else weights / shards
    traffic = updated * _UPDATE_ACCESSES * WEIGHT_BYTES[training.precision]
    if training.precision in {"bf16", "fp16"} and config.strategy not in FULLY_SHARDED:
        traffic += weights * _CAST_BYTES * config.micro_batches
    return _streaming(traffic, gpu)


def _sampled(sample: Sample, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds of the samples of a model whose operations were counted."""
    again = 1 + config.checkpointing / 3
    each = sample.flops * again / (peak(training, gpu) * gpu.matmul)
    each += _streaming(sample.traffic * COMPUTE_BYTES[training.precision] * again, gpu)
    share = training.batch / (config.data * config.tensor * config.pipeline)
    return share * each


def _streaming(size: float, gpu: Gpu) -> float:
    return size / (gpu.bandwidth * _STREAMED)


_ACHIEVED = {"nvlink": 0.8, "pcie": 0.4, "fabric": 0.8}
"""Share of a link's peak bandwidth that collectives reach. Estimates."""
_LATENCY = {"nvlink": 20e-6, "pcie": 30e-6, "infiniband": 30e-6, "efa": 60e-6, "tcp": 200e-6}
"""Seconds to start one collective. Estimates."""
_BUCKET = 25 * 1024**2
"""Bytes of a bucket of DistributedDataParallel
(https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html)."""
_OVERLAP = 2 / 3
"""Share of the compute time that communication can overlap with: the backward pass."""
_CONTENTION = 0.2
"""Share of the time of overlapped communication that compute loses: a collective's kernels take
some of the GPU's processors and memory bandwidth. An estimate."""
_HOST_MEMORY = 20e9
"""Bytes per second at which one process updates weights in host memory. An estimate."""
_LAUNCH = 500e-6
"""Minimum seconds of a block, forward and backward: about fifty kernels with a launch time of ten
microseconds each. An estimate."""
_REDUCED_BYTES = 4


@dataclass(frozen=True)
class Transfer:
    """Data that each GPU sends in one step.

    `sent`: bytes. `overlap`: the share of a step's compute time it can overlap with. `across`:
    whether it goes between nodes.
    """

    name: str
    sent: int
    seconds: float
    overlap: float
    across: bool


@dataclass(frozen=True)
class Step:
    """The estimated time of one step, in seconds."""

    compute: float
    bubble: float
    """Time that pipeline stages are idle."""
    transfers: tuple[Transfer, ...]

    @property
    def sent(self) -> int:
        """Bytes that each GPU sends."""
        return sum(each.sent for each in self.transfers)

    @property
    def communication(self) -> float:
        """Seconds of all transfers."""
        return sum(each.seconds for each in self.transfers)

    @property
    def exposed(self) -> float:
        """Seconds of communication that do not overlap with compute."""
        overlapping = sum(each.seconds for each in self.transfers if each.overlap)
        window = max((each.overlap for each in self.transfers), default=0.0) * self.compute
        hidden = min(overlapping, window)
        return self.communication - (1 - _CONTENTION) * hidden

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.bubble + self.exposed


def step(model: Model, training: Training, cluster: Cluster, config: ParallelConfig) -> Step:
    """Estimate one step of `config`."""
    compute = _compute(model, training, cluster, config)
    bubble = compute * _bubble(model, training, config)
    return Step(compute, bubble, tuple(_transfers(model, training, cluster, config)))


def _bubble(model: Model, training: Training, config: ParallelConfig) -> float:
    """The bubble as a share of the compute time: (p - 1) / m for p stages and m micro-batches
    (https://arxiv.org/abs/2104.04473, section 2.2), and the imbalance of the stages.
    """
    if config.pipeline == 1:
        return 0.0
    works = [
        model.flops_per_token(stage.blocks, training.sequence, head=stage.last)
        for stage in stages(model, config.pipeline)
    ]
    slowest = max(works) * config.pipeline / sum(works)
    return slowest * (1 + (config.pipeline - 1) / config.micro_batches) - 1


def _compute(model: Model, training: Training, cluster: Cluster, config: ParallelConfig) -> float:
    """Seconds of compute on each rank; at least the time to launch the kernels."""
    minimum = config.micro_batches * model.layers / config.pipeline * _LAUNCH
    return max(work(model, training, cluster.gpu, config), minimum)


def _transfers(
    model: Model, training: Training, cluster: Cluster, config: ParallelConfig
) -> Iterator[Transfer]:
    if config.tensor > 1:
        yield _tensor(model, training, cluster, config)
    if config.pipeline > 1:
        yield _pipeline(model, training, cluster, config)
    if config.strategy == "dp":
        yield _broadcast(model, training, cluster, config)
    elif config.strategy == "sharded-table":
        yield from _table(model, training, cluster, config)
    elif config.strategy in FULLY_SHARDED:
        yield from _sharded(model, training, cluster, config)
    elif config.data > 1:
        yield from _replicated(model, training, cluster, config)
    if config.offload:
        yield _offload(model, training, cluster, config)


def _ring(  # noqa: PLR0913 - a collective and where it runs
    name: str,
    cluster: Cluster,
    config: ParallelConfig,
    *,
    size: float,
    ranks: int,
    stride: int,
    calls: float = 1,
    rounds: float = 1,
    overlap: float = _OVERLAP,
) -> Transfer:
    """`rounds` passes of `size` bytes around a ring of ranks with this `stride`.

    A group inside one node uses the node's links. A group across nodes shares the network adapter
    with the other groups of the node.
    """
    sent = rounds * size * (ranks - 1) / ranks
    across = ranks * stride > cluster.gpus_per_node and config.world > cluster.gpus_per_node
    if across:
        network = _ACHIEVED["fabric"] * cluster.bandwidth / min(stride, cluster.gpus_per_node)
        inside = min(ranks, cluster.gpus_per_node // stride) > 1
        speed = min(network, _link(cluster)) if inside else network
        latency = _LATENCY[cluster.fabric]
    else:
        speed, latency = _link(cluster), _LATENCY[cluster.link]
    seconds = sent / speed + calls * latency
    return Transfer(name, int(sent), seconds, overlap=overlap, across=across)


def _link(cluster: Cluster) -> float:
    """Bytes per second inside a node."""
    peak = cluster.gpu.nvlink if cluster.link == "nvlink" else cluster.gpu.pcie
    return peak * _ACHIEVED[cluster.link]


def _replicated(
    model: Model, training: Training, cluster: Cluster, config: ParallelConfig
) -> Iterator[Transfer]:
    """An all-reduce of the gradients; ZeRO-1 then broadcasts the weights that each rank updated
    (https://arxiv.org/abs/1910.02054, section 7). Only the last micro-batch averages gradients, so
    only its backward pass hides it.
    """
    size = _trained(model, config) * WEIGHT_BYTES[training.precision]
    sent = size / (WEIGHT_BYTES[training.precision] / 2 if config.compress else 1)
    group = {"ranks": config.data, "stride": config.tensor}
    manual = config.strategy == "manual"
    calls = sum(1 for _ in model.tensors()) if manual else math.ceil(size / _BUCKET)
    yield _ring(
        "gradients (all-reduce)",
        cluster,
        config,
        size=sent,
        calls=calls,
        rounds=2,
        overlap=0 if manual else _OVERLAP / config.micro_batches,
        **group,
    )
    if config.strategy == "zero1":
        yield _ring("weights (broadcast)", cluster, config, size=size, overlap=0, **group)


def _trained(model: Model, config: ParallelConfig) -> int:
    """Weights of a rank's first stage that have gradients."""
    stage = next(stages(model, config.pipeline))
    return stage.adapters(model, config) if config.lora else stage.size(model, config.tensor, 1)


def _table(
    model: Model, training: Training, cluster: Cluster, config: ParallelConfig
) -> Iterator[Transfer]:
    """Each rank sends the rows that others look up, and gets their gradients; the other weights
    are replicated (https://arxiv.org/abs/1906.00091, section 4).
    """
    rows = training.tokens / config.data * model.width * WEIGHT_BYTES[training.precision]
    for name in ("rows (all-to-all)", "gradients of rows (all-to-all)"):
        yield _ring(name, cluster, config, size=rows, ranks=config.data, stride=1, overlap=0)
    dense = model.parameters - model.embedding.size()
    size = dense * WEIGHT_BYTES[training.precision]
    calls = math.ceil(size / _BUCKET)
    yield _ring(
        "gradients (all-reduce)",
        cluster,
        config,
        size=size,
        calls=calls,
        rounds=2,
        ranks=config.data,
        stride=1,
    )


def _sharded(
    model: Model, training: Training, cluster: Cluster, config: ParallelConfig
) -> Iterator[Transfer]:
    """All-gathers of the weights in the forward and, unless ZeRO-2 keeps them, the backward pass of
    each micro-batch; one reduce-scatter of the gradients (https://arxiv.org/abs/1910.02054,
    section 7). HSDP adds an all-reduce of the shards over the replicas.
    """
    size = next(stages(model, config.pipeline)).size(model, config.tensor, 1)
    group = {"ranks": config.shards, "stride": config.tensor}
    kept = config.strategy in KEPT_GATHERED
    gathers = (1 if config.pipeline > 1 else config.micro_batches) * (1 if kept else 2)
    calls = gathers * (model.layers + 2)
    if config.shards > 1:
        weights = size * COMPUTE_BYTES[training.precision]
        yield _ring(
            "weights (all-gather)",
            cluster,
            config,
            size=weights,
            calls=calls,
            rounds=gathers,
            **group,
        )
        yield _ring(
            "gradients (reduce-scatter)",
            cluster,
            config,
            size=_trained(model, config) * _REDUCED_BYTES,
            calls=model.layers + 2,
            **group,
        )
    replicas = config.data // config.shards
    if replicas > 1:
        yield _ring(
            "gradients (all-reduce of shards)",
            cluster,
            config,
            size=_trained(model, config) * _REDUCED_BYTES / config.shards,
            rounds=2,
            ranks=replicas,
            stride=config.tensor * config.shards,
            calls=model.layers + 2,
        )


def _tensor(model: Model, training: Training, cluster: Cluster, config: ParallelConfig) -> Transfer:
    """Two all-gathers and two reduce-scatters of a block's activations in each direction, and again
    when they are recomputed (https://arxiv.org/abs/2205.05198, section 4.2); selective
    checkpointing repeats the all-gathers only.
    """
    blocks = next(stages(model, config.pipeline)).blocks
    each = 12 if config.checkpointing else 10 if config.selective else 8
    passes = each * config.micro_batches * blocks
    tokens = micro_tokens(training, config)
    return _ring(
        "activations (tensor parallel)",
        cluster,
        config,
        size=tokens * model.width * COMPUTE_BYTES[training.precision],
        ranks=config.tensor,
        stride=1,
        calls=passes,
        rounds=passes,
        overlap=0,
    )


def _pipeline(
    model: Model, training: Training, cluster: Cluster, config: ParallelConfig
) -> Transfer:
    """Each micro-batch is sent to the next stage and its gradient back. Stages are the outermost
    dimension, so neighbors may be on different nodes.
    """
    stride = config.data * config.tensor
    across = config.pipeline * stride > cluster.gpus_per_node < cluster.world
    message = boundary_bytes(model, training, config)
    sent = 2 * message * config.micro_batches
    neighbors = min(stride, cluster.gpus_per_node)
    speed = _ACHIEVED["fabric"] * cluster.bandwidth / neighbors if across else _link(cluster)
    latency = _LATENCY[cluster.fabric if across else cluster.link]
    seconds = sent / speed + 2 * config.micro_batches * latency
    return Transfer(
        "activations (to the next stage)", sent, seconds, overlap=_OVERLAP, across=across
    )


def _broadcast(
    model: Model, training: Training, cluster: Cluster, config: ParallelConfig
) -> Transfer:
    """nn.DataParallel broadcasts the weights and sums the gradients in every step, over the link of
    the first GPU
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html).
    """
    weights = model.parameters * WEIGHT_BYTES[training.precision]
    sent = 2 * weights * (config.data - 1) * config.micro_batches
    seconds = sent / _link(cluster)
    return Transfer("weights and gradients", sent, seconds, overlap=0, across=False)


def _offload(
    model: Model, training: Training, cluster: Cluster, config: ParallelConfig
) -> Transfer:
    """Shards go to the GPU for each all-gather, gradients back; the host updates the weights."""
    shard = model.parameters / (config.shards * config.tensor)
    weight = WEIGHT_BYTES[training.precision]
    sent = int(shard * weight * 3 * config.micro_batches)
    seconds = sent / (cluster.gpu.pcie * _ACHIEVED["pcie"]) + shard * weight * 7 / _HOST_MEMORY
    return Transfer("states (to and from the host)", sent, seconds, overlap=0, across=False)
