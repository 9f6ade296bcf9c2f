"""How to train, on which hardware, and every configuration of the parallelism that it allows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deploykit.advise.gpus import Gpu
from deploykit.advise.models import Model

Precision = Literal["fp32", "bf16", "fp16", "pure-bf16"]
"""bf16 and fp16 keep weights in fp32 and compute in 16 bits; pure-bf16 uses 16 bits throughout."""
Optimizer = Literal["adamw", "sgd", "sgd-momentum"]
Fabric = Literal["tcp", "efa", "infiniband"]
Strategy = Literal[
    "single", "dp", "manual", "ddp", "zero1", "zero2", "zero3", "hsdp", "tp", "pp", "tp-dp",
    "pp-dp", "fsdp-tp", "pp-fsdp-tp", "sharded-table",
]  # fmt: skip

WEIGHT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 4, "fp16": 4, "pure-bf16": 2}
COMPUTE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "pure-bf16": 2}
FULLY_SHARDED = frozenset({"zero2", "zero3", "hsdp", "fsdp-tp", "pp-fsdp-tp"})
"""Strategies that use FSDP2's fully_shard."""
KEPT_GATHERED = frozenset({"zero2", "pp-fsdp-tp"})
"""Those whose weights stay gathered for a step. In a pipeline they would be gathered again for
every micro-batch (so does torchtitan by default, `fsdp_reshard_after_forward` in
https://github.com/pytorch/torchtitan/blob/main/torchtitan/config/configs.py)."""

_GIGABIT = 10**9 / 8
FABRICS: Mapping[str, float] = {
    "tcp": 25 * _GIGABIT,
    "efa": 400 * _GIGABIT,
    "infiniband": 1600 * _GIGABIT,
}
"""Default bytes per second of one node in one direction: a common cloud network; p4d.24xlarge
(https://aws.amazon.com/ec2/instance-types/p4/); eight HDR adapters as in a DGX A100
 (https://www.nvidia.com/en-us/data-center/dgx-a100/)."""


@dataclass(frozen=True)
class Training:
    """How to train. `batch`: samples of a step over all ranks. `sequence`: tokens of a sample.

    `checkpointing`: whether blocks recompute their activations in the backward pass, or
    "selective" for those operations that cost little; None tries all three. `offload`: whether
    states are kept in host memory; None tries both. `lora`: whether a given model is fine-tuned
    through adapters (https://arxiv.org/abs/2106.09685); None tries both. `compiled`: whether
    torch.compile fuses operations. `loss_parallel`: whether tensor parallelism keeps the logits
    split over the vocabulary
    (https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html).
    """

    batch: int
    sequence: int
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    checkpointing: bool | Literal["selective"] | None = None
    offload: bool | None = None
    on_cpu: bool = False
    lora: bool | None = False
    compiled: bool = False
    loss_parallel: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class Cluster:
    """The hardware. `bandwidth`: bytes per second from one node to the others, in one direction."""

    gpu: Gpu
    gpus_per_node: int = 1
    nodes: int = 1
    link: Literal["nvlink", "pcie"] = "nvlink"
    fabric: Fabric = "tcp"
    bandwidth: float = FABRICS["tcp"]

    @property
    def world(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class ParallelConfig:
    """A strategy with its degrees.

    `world` ranks = `data` x `tensor` x `pipeline`, where the states are sharded over `shards` of
    the `data` ranks. `micro_batches`: into how many a rank's share of the batch is split.
    `checkpointing`: every operation of a block is recomputed; `selective`: only cheap ones.
    `compress`: the type in which gradients are sent, if not their own.
    """

    strategy: Strategy
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    shards: int = 1
    micro_batches: int = 1
    checkpointing: bool = False
    offload: bool = False
    selective: bool = False
    compress: Literal["", "fp16", "bf16"] = ""
    lora: bool = False

    @property
    def world(self) -> int:
        """Ranks that the configuration uses."""
        return self.data * self.tensor * self.pipeline


STRATEGIES: dict[Strategy, str] = {
    "single": "one process",
    "dp": "nn.DataParallel: one process drives all GPUs of a node",
    "manual": "gradients averaged by a plain all_reduce; for teaching only",
    "ddp": "every GPU holds the whole model; gradients are averaged",
    "zero1": "ddp with optimizer states sharded over the GPUs",
    "zero2": "optimizer states and gradients sharded; weights gathered once per step",
    "zero3": "weights, gradients and optimizer states sharded; each layer gathered when it is used",
    "hsdp": "zero3 within each node; nodes are replicas that average gradients",
    "sharded-table": "rows of the embedding table sharded over the GPUs, all else replicated",
    "tp": "every layer split over the GPUs (tensor parallelism)",
    "pp": "layers divided into stages, one per GPU (pipeline parallelism)",
    "tp-dp": "tensor parallelism within each node; nodes are replicas that average gradients",
    "pp-dp": "replicated pipelines that average gradients",
    "fsdp-tp": "tensor parallelism within each node, sharding across nodes",
    "pp-fsdp-tp": "three dimensions: pipeline stages, sharding across nodes, tensor parallelism",
}
"""In order of simplicity, each with a description."""
FOR_TEACHING = frozenset({"dp", "manual"})
"""Never recommended: ddp does the same, faster."""
_WITH_LORA = frozenset({"single", "ddp", "zero3", "hsdp", "tp", "fsdp-tp"})
"""Strategies for which adapters are considered: those that an expert would use with them."""
_RECOMPUTING: dict[bool | Literal["selective"], dict[str, bool]] = {
    False: {},
    "selective": {"selective": True},
    True: {"checkpointing": True},
}
_CHOICES = {None: (False, True), False: (False,), True: (True,)}
_MAX_MICRO_BATCHES = 64
"""For each stage of a pipeline."""
_LARGE_TABLE = 0.5
"""Share of the parameters from which on an embedding is worth a strategy of its own."""


def configs(model: Model, training: Training, cluster: Cluster) -> Iterator[ParallelConfig]:
    """Yield all of them, with each number of micro-batches, checkpointing and offload."""
    for degrees in _degrees(model, training, cluster):
        if training.batch % degrees.data:
            continue
        for micro_batches in _divisors(training.batch // degrees.data):
            # with fewer micro-batches than stages Schedule1F1B raises ValueError
            if degrees.pipeline <= micro_batches <= _MAX_MICRO_BATCHES * degrees.pipeline:
                for switches in _switches(training, cluster, degrees):
                    yield dataclasses.replace(degrees, micro_batches=micro_batches, **switches)


def _degrees(model: Model, training: Training, cluster: Cluster) -> Iterator[ParallelConfig]:
    """Each strategy with the degrees that the cluster allows."""
    world, node = cluster.world, cluster.gpus_per_node
    has_large_table = model.embedding.size() > _LARGE_TABLE * model.parameters
    yield ParallelConfig("single")
    if node > 1 and not cluster.gpu.is_cpu:
        yield ParallelConfig("dp", data=node)
    if world > 1:
        yield ParallelConfig("manual", data=world)
        yield ParallelConfig("ddp", data=world)
        yield ParallelConfig("zero1", data=world)
        yield ParallelConfig("zero2", data=world, shards=world)
    yield ParallelConfig("zero3", data=world, shards=world)
    if cluster.nodes > 1 and node > 1:
        yield ParallelConfig("hsdp", data=world, shards=node)
    if world > 1 and not model.vocabulary and has_large_table:
        yield ParallelConfig("sharded-table", data=world)
    if model.layers:
        yield from _splitting(model, training, cluster)


def _splitting(model: Model, training: Training, cluster: Cluster) -> Iterator[ParallelConfig]:
    """Degrees of the strategies that split layers or divide them into stages.

    Tensor parallelism takes ranks of one node, as many as divide the heads, the MLP and, for
    sequence parallelism, the sequence. Only `tp` alone may span nodes, since it has no other degree
    to use them with.
    """
    world, node = cluster.world, cluster.gpus_per_node
    for tensor, pipeline in itertools.product(_divisors(world), repeat=2):
        data = world // (tensor * pipeline)
        if world % (tensor * pipeline) or tensor == pipeline == 1 or pipeline > model.layers:
            continue
        if any(size % tensor for size in (model.heads, model.feedforward, training.sequence)):
            continue
        degrees = ParallelConfig("tp", data=data, tensor=tensor, pipeline=pipeline)
        sharded = dataclasses.replace(degrees, shards=data)
        if tensor == world:
            yield degrees
        elif tensor == 1:
            yield dataclasses.replace(degrees, strategy="pp" if data == 1 else "pp-dp")
        elif node % tensor == 0 and data > 1 and pipeline == 1:
            yield dataclasses.replace(degrees, strategy="tp-dp")
            yield dataclasses.replace(sharded, strategy="fsdp-tp")
        elif node % tensor == 0 and data > 1:
            yield dataclasses.replace(sharded, strategy="pp-fsdp-tp")


def _switches(
    training: Training, cluster: Cluster, degrees: ParallelConfig
) -> Iterator[dict[str, Any]]:
    """Every setting of what does not change the degrees.

    Over TCP ddp can send gradients in 16 bits: bf16 if the GPU supports it, which has fp32's range
    (https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html).
    """
    offload = _CHOICES[training.offload] if degrees.strategy == "zero3" else (False,)
    lora = _CHOICES[training.lora] if degrees.strategy in _WITH_LORA else (False,)
    if training.lora and True not in lora:
        return
    recomputing = tuple(_RECOMPUTING)
    if training.checkpointing is not None:
        recomputing = (training.checkpointing,)
    compress = [""]
    slow = cluster.fabric == "tcp" and cluster.nodes > 1 and not cluster.gpu.is_cpu
    if degrees.strategy == "ddp" and slow and training.precision != "pure-bf16":
        compress.append("bf16" if cluster.gpu.flops["bf16"] else "fp16")
    for recompute, off, adapters, sent in itertools.product(recomputing, offload, lora, compress):
        yield {**_RECOMPUTING[recompute], "offload": off, "lora": adapters, "compress": sent}


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
