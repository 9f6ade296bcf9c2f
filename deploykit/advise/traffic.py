"""How much a layout sends per step and how long a step takes: rough, to compare layouts.

Collectives are rings: of S bytes over n ranks each sends (n-1)/n x S for an all-gather or a
reduce-scatter, twice that for an all-reduce
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deploykit.advise import activations
from deploykit.advise.memory import stages
from deploykit.advise.plan import COMPUTE_BYTES, WEIGHT_BYTES, Cluster, Layout, Training
from deploykit.advise.shape import Model

UTILISATION = 0.4
"""Share of the peak that a good loop reaches
(https://arxiv.org/abs/2104.04473, table 1: 41% to 52% on A100)."""
_ACHIEVED = {"nvlink": 0.8, "pcie": 0.4, "fabric": 0.8}
"""Share of a link's peak that collectives reach: estimates."""
_LATENCY = {"nvlink": 20e-6, "pcie": 30e-6, "infiniband": 30e-6, "efa": 60e-6, "tcp": 200e-6}
"""Seconds to start one collective: estimates."""
_BUCKET = 25 * 1024**2
"""Bytes of a bucket of DistributedDataParallel
(https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html)."""
_OVERLAP = 2 / 3
"""Share of the computing that communication can hide behind: the backward pass."""
_HOST_MEMORY = 20e9
"""Bytes per second at which one process updates weights in the host's memory: an estimate."""
_LAUNCH = 500e-6
"""Least seconds of a block, forward and backward: about fifty kernels, each of which takes some ten
microseconds to start. An estimate."""
_REDUCED_BYTES = 4


@dataclass(frozen=True)
class Transfer:
    """What each GPU sends in one step, and how long it takes.

    `behind`: the share of a step's computing that goes on at the same time. `across`: whether it
    crosses from node to node.
    """

    what: str
    sent: int
    seconds: float
    behind: float
    across: bool


@dataclass(frozen=True)
class Step:
    """The estimated time of one step, in seconds."""

    compute: float
    bubble: float
    """Waiting of pipeline stages for each other."""
    transfers: tuple[Transfer, ...]

    @property
    def sent(self) -> int:
        return sum(each.sent for each in self.transfers)

    @property
    def communication(self) -> float:
        return sum(each.seconds for each in self.transfers)

    @property
    def exposed(self) -> float:
        """Communication for which computing has to wait."""
        hidden = sum(each.seconds for each in self.transfers if each.behind)
        window = max((each.behind for each in self.transfers), default=0.0) * self.compute
        return self.communication - hidden + max(0.0, hidden - window)

    @property
    def seconds(self) -> float:
        return self.compute + self.bubble + self.exposed


def step(model: Model, training: Training, cluster: Cluster, layout: Layout) -> Step:
    """An estimate for one step of `layout`."""
    compute = _compute(model, training, cluster, layout)
    bubble = compute * _waiting(model, training, layout)
    return Step(compute, bubble, tuple(_transfers(model, training, cluster, layout)))


def _waiting(model: Model, training: Training, layout: Layout) -> float:
    """Time that a pipeline's stages wait, as a share of their work: until it is full,
    (p - 1) / m of p stages and m micro-batches (https://arxiv.org/abs/2104.04473, section 2.2),
    and all the time for the slowest stage.
    """
    if layout.pipeline == 1:
        return 0.0
    works = [
        model.work(stage.blocks, training.sequence, head=stage.last)
        for stage in stages(model, layout.pipeline)
    ]
    slowest = max(works) * layout.pipeline / sum(works)
    return slowest * (1 + (layout.pipeline - 1) / layout.micro_batches) - 1


def _compute(model: Model, training: Training, cluster: Cluster, layout: Layout) -> float:
    """Seconds of computing on each rank. Checkpointing runs the forward pass, a third of the work,
    once more (https://arxiv.org/abs/2104.04473, section 3.5).
    """
    work = model.flops(training.tokens, training.sequence)
    work *= 4 / 3 if layout.checkpointing else 1
    least = layout.micro_batches * model.layers / layout.pipeline * _LAUNCH
    return max(work / (layout.world * rate(training, cluster)), least)


def rate(training: Training, cluster: Cluster) -> float:
    """Operations per second of one GPU as they are reached; fp32 where it has no bf16 units."""
    name = "bf16" if training.precision == "pure-bf16" else training.precision
    flops = cluster.gpu.flops
    return UTILISATION * (flops.get(name) or flops["fp32"])


def _transfers(
    model: Model, training: Training, cluster: Cluster, layout: Layout
) -> Iterator[Transfer]:
    if layout.tensor > 1:
        yield _tensor(model, training, cluster, layout)
    if layout.pipeline > 1:
        yield _pipeline(model, training, cluster, layout)
    if layout.strategy == "dp":
        yield _broadcast(model, training, cluster, layout)
    elif layout.strategy in {"zero2", "zero3", "hsdp", "fsdp-tp"}:
        yield from _sharded(model, training, cluster, layout)
    elif layout.data > 1:
        yield from _replicated(model, training, cluster, layout)
    if layout.offload:
        yield _offload(model, training, cluster, layout)


def _ring(  # noqa: PLR0913 - a collective and where it runs
    what: str,
    cluster: Cluster,
    layout: Layout,
    *,
    size: float,
    ranks: int,
    stride: int,
    calls: float = 1,
    rounds: float = 1,
    behind: float = _OVERLAP,
) -> Transfer:
    """`rounds` passes of `size` bytes around a ring of ranks that lie `stride` apart.

    A group inside one node uses its links. Any other shares its node's adapter with the groups
    that run beside it.
    """
    sent = rounds * size * (ranks - 1) / ranks
    across = ranks * stride > cluster.gpus_per_node and layout.world > cluster.gpus_per_node
    if across:
        speed = _ACHIEVED["fabric"] * cluster.bandwidth / min(stride, cluster.gpus_per_node)
        latency = _LATENCY[cluster.fabric]
    else:
        speed, latency = _link(cluster), _LATENCY[cluster.link]
    seconds = sent / speed + calls * latency
    return Transfer(what, int(sent), seconds, behind=behind, across=across)


def _link(cluster: Cluster) -> float:
    """Bytes per second inside a node."""
    peak = cluster.gpu.nvlink if cluster.link == "nvlink" else cluster.gpu.pcie
    return peak * _ACHIEVED[cluster.link]


def _replicated(
    model: Model, training: Training, cluster: Cluster, layout: Layout
) -> Iterator[Transfer]:
    """An all-reduce of the gradients; ZeRO-1 then broadcasts the weights that each rank updated
    (https://arxiv.org/abs/1910.02054, section 7). Only the last micro-batch averages gradients, so
    only its backward pass hides it.
    """
    stage = next(stages(model, layout.pipeline))
    size = stage.size(model, layout.tensor, 1) * WEIGHT_BYTES[training.precision]
    place = {"ranks": layout.data, "stride": layout.tensor}
    manual = layout.strategy == "manual"
    calls = sum(1 for _ in model.tensors()) if manual else math.ceil(size / _BUCKET)
    yield _ring(
        "gradients (all-reduce)",
        cluster,
        layout,
        size=size,
        calls=calls,
        rounds=2,
        behind=0 if manual else _OVERLAP / layout.micro_batches,
        **place,
    )
    if layout.strategy == "zero1":
        yield _ring("weights (broadcast)", cluster, layout, size=size, behind=0, **place)


def _sharded(
    model: Model, training: Training, cluster: Cluster, layout: Layout
) -> Iterator[Transfer]:
    """Weights gathered in the forward pass and, unless kept (ZeRO-2), in the backward pass, for
    each micro-batch; gradients reduced and scattered once (https://arxiv.org/abs/1910.02054,
    section 7). HSDP adds an all-reduce of the shards over the copies.
    """
    size = next(stages(model, layout.pipeline)).size(model, layout.tensor, 1)
    place = {"ranks": layout.shards, "stride": layout.tensor}
    gathers = layout.micro_batches * (1 if layout.strategy == "zero2" else 2)
    calls = gathers * (model.layers + 2)
    if layout.shards > 1:
        weights = size * COMPUTE_BYTES[training.precision]
        yield _ring(
            "weights (all-gather)",
            cluster,
            layout,
            size=weights,
            calls=calls,
            rounds=gathers,
            **place,
        )
        yield _ring(
            "gradients (reduce-scatter)",
            cluster,
            layout,
            size=size * _REDUCED_BYTES,
            calls=model.layers + 2,
            **place,
        )
    copies = layout.data // layout.shards
    if copies > 1:
        yield _ring(
            "gradients (all-reduce of shards)",
            cluster,
            layout,
            size=size * _REDUCED_BYTES / layout.shards,
            rounds=2,
            ranks=copies,
            stride=layout.tensor * layout.shards,
            calls=model.layers + 2,
        )


def _tensor(model: Model, training: Training, cluster: Cluster, layout: Layout) -> Transfer:
    """Two all-gathers and two reduce-scatters of a block's activations in each direction, again
    when it is recomputed (https://arxiv.org/abs/2205.05198, section 4.2).
    """
    blocks = next(stages(model, layout.pipeline)).blocks
    passes = (12 if layout.checkpointing else 8) * layout.micro_batches * blocks
    tokens = activations.micro_tokens(training, layout)
    return _ring(
        "activations (tensor parallel)",
        cluster,
        layout,
        size=tokens * model.width * COMPUTE_BYTES[training.precision],
        ranks=layout.tensor,
        stride=1,
        calls=passes,
        rounds=passes,
        behind=0,
    )


def _pipeline(model: Model, training: Training, cluster: Cluster, layout: Layout) -> Transfer:
    """Each micro-batch goes to the next stage and its gradient comes back; stages are the outermost
    dimension, so that neighbours may lie on two nodes.
    """
    stride = layout.data * layout.tensor
    across = layout.pipeline * stride > cluster.gpus_per_node < cluster.world
    message = activations.of_boundary(model, training, layout)
    sent = 2 * message * layout.micro_batches
    beside = min(stride, cluster.gpus_per_node)
    speed = _ACHIEVED["fabric"] * cluster.bandwidth / beside if across else _link(cluster)
    latency = _LATENCY[cluster.fabric if across else cluster.link]
    seconds = sent / speed + 2 * layout.micro_batches * latency
    return Transfer(
        "activations (to the next stage)", sent, seconds, behind=_OVERLAP, across=across
    )


def _broadcast(model: Model, training: Training, cluster: Cluster, layout: Layout) -> Transfer:
    """nn.DataParallel sends the weights to each GPU and adds up their gradients, every step,
    through the first GPU's link
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html).
    """
    weights = model.parameters * WEIGHT_BYTES[training.precision]
    sent = 2 * weights * (layout.data - 1) * layout.micro_batches
    seconds = sent / _link(cluster)
    return Transfer("weights and gradients", sent, seconds, behind=0, across=False)


def _offload(model: Model, training: Training, cluster: Cluster, layout: Layout) -> Transfer:
    """Shards go to the GPU for each gather, gradients back, and the host updates the weights."""
    shard = model.parameters / (layout.shards * layout.tensor)
    weight = WEIGHT_BYTES[training.precision]
    sent = int(shard * weight * 3 * layout.micro_batches)
    seconds = sent / (cluster.gpu.pcie * _ACHIEVED["pcie"]) + shard * weight * 7 / _HOST_MEMORY
    return Transfer("states (to and from the host)", sent, seconds, behind=0, across=False)
