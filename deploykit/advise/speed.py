"""Seconds of a step: compute on one GPU, and what the GPUs send each other. Rough estimates, to
compare configurations.

A step's operations take turns, so their times add up. Products run at the share of the peak that
large ones reach (`matmul` in gpus.toml), attention at that of its kernel (`attention`), and all
else at the speed of the memory: norms, activations and the loss do few operations per byte
(https://arxiv.org/abs/2007.00072, table 1). That is why a narrow model, or a layer that tensor
parallelism makes narrow, reaches a smaller share of the peak: its products shrink with the square
of the width, its traffic with the width.

Collectives are rings: for S bytes over n ranks each rank sends (n-1)/n x S in an all-gather or a
reduce-scatter, and twice that in an all-reduce
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from deploykit.advise.gpus import Gpu
from deploykit.advise.memory import REDUCED_BYTES, Activations, stages
from deploykit.advise.models import Model
from deploykit.advise.strategies import (
    COMPUTE_BYTES,
    FULLY_SHARDED,
    KEPT_GATHERED,
    WEIGHT_BYTES,
    Cluster,
    ParallelConfig,
    Strategy,
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

_REDUCED = "gradients (all-reduce)"
_SHARDED = ("weights (all-gather)", "gradients (reduce-scatter)")
COLLECTIVES: Mapping[Strategy, tuple[str, ...]] = {
    "single": (),
    "dp": (),
    "manual": (_REDUCED,),
    "ddp": (_REDUCED,),
    "zero1": (_REDUCED, "weights (broadcast)"),
    "zero2": _SHARDED,
    "zero3": _SHARDED,
    "hsdp": (*_SHARDED, "gradients (all-reduce of shards)"),
    "sharded-table": ("rows (all-to-all)", "gradients of rows (all-to-all)", _REDUCED),
    "tp": (),
    "pp": (),
    "tp-dp": (_REDUCED,),
    "pp-dp": (_REDUCED,),
    "fsdp-tp": _SHARDED,
    "pp-fsdp-tp": _SHARDED,
}
"""Collectives of each strategy per step, besides the activations of tensor and pipeline parallelism
and what nn.DataParallel copies; `_Traffic` has the size of each."""


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
    minimum = config.micro_batches * model.layers / config.pipeline * _LAUNCH
    compute = max(_work(model, training, cluster.gpu, config), minimum)
    bubble = compute * _bubble(model, training, config)
    return Step(compute, bubble, tuple(_Traffic(model, training, cluster, config).transfers()))


def peak(training: Training, gpu: Gpu) -> float:
    """Operations per second of the data sheet; those of fp32 if the GPU does not support bf16."""
    name = "bf16" if training.precision == "pure-bf16" else training.precision
    return gpu.flops.get(name) or gpu.flops["fp32"]


def _work(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds of compute of one step on one rank, without waiting; an equal share of a pipeline."""
    products = peak(training, gpu) * gpu.matmul
    size = COMPUTE_BYTES[training.precision]
    if model.sample is not None:
        again = 1 + config.checkpointing / 3
        each = model.sample.flops * again / products
        each += _streaming(model.sample.traffic * size * again, gpu)
        layers = training.batch / config.world * each
    else:
        block, head = _block(model, training, gpu, config), _head(model, training, gpu, config)
        tokens = training.tokens / config.data
        layers = tokens * (model.layers * block + head) / config.pipeline
    # once a step the optimizer's update, and once a micro-batch the casts of the weights
    weights = model.parameters / (config.tensor * config.pipeline)
    shards = config.data if config.strategy == "zero1" else config.shards
    updated = 0.0 if config.lora else weights / shards
    traffic = updated * _UPDATE_ACCESSES * WEIGHT_BYTES[training.precision]
    if training.precision in {"bf16", "fp16"} and config.strategy not in FULLY_SHARDED:
        traffic += weights * _CAST_BYTES * config.micro_batches
    return layers + _streaming(traffic, gpu)


def _block(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds per token of a block, forward and backward.

    LoRA needs no gradients of frozen weights. A fused attention kernel skips the masked half of the
    scores.
    """
    size, kind = COMPUTE_BYTES[training.precision], (model.gated, training.compiled)
    repeated = 1.0 if config.checkpointing else _RECOMPUTED if config.selective else 0.0
    repeats = 1 + repeated + (_BACKWARD - config.lora)
    products = 2 * model.block.matrices() / config.tensor * repeats
    wide = (_WIDE_PASSES[kind] + _ATTENTION_PASSES) * model.width
    passes = (wide + _INNER_PASSES[kind] * model.feedforward) / config.tensor
    again = 1 if config.checkpointing or config.selective else 0
    traffic = model.block.edges(config.tensor) * repeats + passes * (3 + again)

    forward = 4 * model.width * training.sequence / config.tensor
    again = 1 if config.checkpointing else 0
    if model.flash:
        operations = forward / 2 * (1 + again + _FLASH_BACKWARD)
        attention = operations / (peak(training, gpu) * gpu.attention)
    else:
        scores = model.heads * training.sequence / config.tensor * _SCORE_PASSES
        repeats = 1 + again + _BACKWARD
        attention = forward * repeats / (peak(training, gpu) * gpu.matmul)
        attention += _streaming(scores * size * repeats, gpu)
    return (
        products / (peak(training, gpu) * gpu.matmul) + attention + _streaming(traffic * size, gpu)
    )


def _head(model: Model, training: Training, gpu: Gpu, config: ParallelConfig) -> float:
    """Seconds per token of the head and the loss."""
    products = 2 * model.head_size * (1 + _BACKWARD) / config.tensor
    split = config.tensor if training.loss_parallel else 1
    traffic = model.vocabulary * _LOGIT_BYTES[training.compiled] / split
    return products / (peak(training, gpu) * gpu.matmul) + _streaming(traffic, gpu)


def _streaming(size: float, gpu: Gpu) -> float:
    """Seconds to read or write `size` bytes of the GPU's memory."""
    return size / (gpu.bandwidth * _STREAMED)


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


class _Ring(NamedTuple):
    """`rounds` passes of `size` bytes around a ring of `ranks` ranks, `stride` apart."""

    name: str
    size: float
    ranks: int
    stride: int
    rounds: float = 1
    calls: float = 1
    overlap: float = _OVERLAP


@dataclass(frozen=True)
class _Traffic:
    """The transfers of a configuration, by the names in `COLLECTIVES`."""

    model: Model
    training: Training
    cluster: Cluster
    config: ParallelConfig

    def transfers(self) -> Iterator[Transfer]:
        """Every transfer of a step."""
        if self.config.tensor > 1:
            yield self._around(self._tensor())
        if self.config.pipeline > 1:
            yield self._pipeline()
        if self.config.strategy == "dp":
            yield self._data_parallel()
        rings = self._rings()
        for name in COLLECTIVES[self.config.strategy]:
            if rings[name].ranks > 1:
                yield self._around(rings[name])
        if self.config.offload:
            yield self._offload()

    def _rings(self) -> dict[str, _Ring]:
        """Every collective by its name.

        Gradients are averaged after the last micro-batch only, so only its backward pass hides
        them; ZeRO-1 then broadcasts the weights that each rank updated. ZeRO gathers the weights in
        the forward and, unless ZeRO-2 keeps them, the backward pass of each micro-batch
        (https://arxiv.org/abs/1910.02054, section 7). Rows of a sharded table go to the ranks that
        look them up, their gradients back (https://arxiv.org/abs/1906.00091, section 4).
        """
        model, training, config = self.model, self.training, self.config
        weight = WEIGHT_BYTES[training.precision]
        stage = next(stages(model, config.pipeline))
        whole = stage.size(model, config.tensor, 1)
        trained = stage.adapters(model, config) if config.lora else whole
        layers = model.layers + 2
        gathers = 1 if config.strategy in KEPT_GATHERED else 2
        gathers *= 1 if config.pipeline > 1 else config.micro_batches
        rows = training.tokens / config.data * model.width * weight
        data = {"ranks": config.data, "stride": config.tensor}
        shards = {"ranks": config.shards, "stride": config.tensor}
        replicas = {
            "ranks": config.data // config.shards,
            "stride": config.tensor * config.shards,
        }
        size, calls = whole * COMPUTE_BYTES[training.precision], gathers * layers
        rings = (
            self._gradients(trained * weight),
            _Ring("weights (broadcast)", trained * weight, overlap=0, **data),
            _Ring(_SHARDED[0], size, rounds=gathers, calls=calls, **shards),
            _Ring(_SHARDED[1], trained * REDUCED_BYTES, calls=layers, **shards),
            _Ring(
                "gradients (all-reduce of shards)",
                trained * REDUCED_BYTES / config.shards,
                rounds=2,
                calls=layers,
                **replicas,
            ),
            _Ring("rows (all-to-all)", rows, overlap=0, **data),
            _Ring("gradients of rows (all-to-all)", rows, overlap=0, **data),
        )
        return {ring.name: ring for ring in rings}

    def _gradients(self, size: float) -> _Ring:
        """The all-reduce of replicated gradients, in buckets; by hand one for each tensor."""
        config, weight = self.config, WEIGHT_BYTES[self.training.precision]
        overlap = _OVERLAP / config.micro_batches
        if config.strategy == "sharded-table":
            size = (self.model.parameters - self.model.embedding.size()) * weight
            overlap = _OVERLAP
        calls = math.ceil(size / _BUCKET)
        if config.strategy == "manual":
            calls, overlap = sum(1 for _ in self.model.tensors()), 0
        sent = size / (weight / 2) if config.compress else size
        data = {"ranks": config.data, "stride": config.tensor}
        return _Ring(_REDUCED, sent, rounds=2, calls=calls, overlap=overlap, **data)

    def _tensor(self) -> _Ring:
        """Two all-gathers and two reduce-scatters of a block's activations in each direction, and
        again when they are recomputed (https://arxiv.org/abs/2205.05198, section 4.2); selective
        checkpointing repeats the all-gathers only.
        """
        model, training, config = self.model, self.training, self.config
        repeats = 12 if config.checkpointing else 10 if config.selective else 8
        calls = repeats * config.micro_batches * next(stages(model, config.pipeline)).blocks
        tokens = Activations(model, training, config).micro_tokens
        return _Ring(
            "activations (tensor parallel)",
            tokens * model.width * COMPUTE_BYTES[training.precision],
            ranks=config.tensor,
            stride=1,
            rounds=calls,
            calls=calls,
            overlap=0,
        )

    def _around(self, ring: _Ring) -> Transfer:
        """The time of a ring.

        A group inside one node uses the node's links. A group across nodes shares the network
        adapter with the other groups of the node.
        """
        cluster, ranks, stride = self.cluster, ring.ranks, ring.stride
        node = cluster.gpus_per_node
        sent = ring.rounds * ring.size * (ranks - 1) / ranks
        across = ranks * stride > node and self.config.world > node
        speed, latency = self._link, _LATENCY[cluster.link]
        if across:
            network = _ACHIEVED["fabric"] * cluster.bandwidth / min(stride, node)
            inside = min(ranks, node // stride) > 1
            speed, latency = min(network, speed) if inside else network, _LATENCY[cluster.fabric]
        seconds = sent / speed + ring.calls * latency
        return Transfer(ring.name, int(sent), seconds, overlap=ring.overlap, across=across)

    @property
    def _link(self) -> float:
        """Bytes per second inside a node."""
        gpu, link = self.cluster.gpu, self.cluster.link
        return (gpu.nvlink if link == "nvlink" else gpu.pcie) * _ACHIEVED[link]

    def _pipeline(self) -> Transfer:
        """Each micro-batch is sent to the next stage and its gradient back. Stages are the
        outermost dimension, so neighbors may be on different nodes.
        """
        cluster, config = self.cluster, self.config
        stride = config.data * config.tensor
        across = config.pipeline * stride > cluster.gpus_per_node < cluster.world
        boundary = Activations(self.model, self.training, config).boundary
        sent = 2 * boundary * config.micro_batches
        neighbors = min(stride, cluster.gpus_per_node)
        speed = _ACHIEVED["fabric"] * cluster.bandwidth / neighbors if across else self._link
        latency = _LATENCY[cluster.fabric if across else cluster.link]
        seconds = sent / speed + 2 * config.micro_batches * latency
        name = "activations (to the next stage)"
        return Transfer(name, sent, seconds, overlap=_OVERLAP, across=across)

    def _data_parallel(self) -> Transfer:
        """nn.DataParallel broadcasts the weights and sums the gradients in every step, over the
        link of the first GPU
        (https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html).
        """
        weights = self.model.parameters * WEIGHT_BYTES[self.training.precision]
        sent = 2 * weights * (self.config.data - 1) * self.config.micro_batches
        return Transfer("weights and gradients", sent, sent / self._link, overlap=0, across=False)

    def _offload(self) -> Transfer:
        """Shards go to the GPU for each all-gather, gradients back; the host updates weights."""
        size = self.model.parameters / (self.config.shards * self.config.tensor)
        size *= WEIGHT_BYTES[self.training.precision]
        sent = int(size * 3 * self.config.micro_batches)
        seconds = sent / (self.cluster.gpu.pcie * _ACHIEVED["pcie"]) + size * 7 / _HOST_MEMORY
        return Transfer("states (to and from the host)", sent, seconds, overlap=0, across=False)
