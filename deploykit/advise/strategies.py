"""How to train, on which hardware, and one configuration of the parallelism. Data only."""

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
    "manual": "gradients averaged by a plain all_reduce; for teaching",
    "ddp": "every GPU holds the whole model; gradients are averaged",
    "zero1": "ddp with optimizer states sharded over the GPUs",
    "zero2": "optimizer states and gradients sharded; weights gathered once a step",
    "zero3": "weights, gradients and optimizer states sharded; each layer gathered when it is used",
    "hsdp": "zero3 inside a node, replicated across nodes, which average gradients",
    "sharded-table": "rows of the embedding table divided over the GPUs, all else replicated",
    "tp": "every layer split over the GPUs (tensor parallelism)",
    "pp": "layers divided into stages, one per GPU (pipeline parallelism)",
    "tp-dp": "tensor parallelism inside a node; replicas average gradients",
    "pp-dp": "replicated pipelines that average gradients",
    "fsdp-tp": "tensor parallelism inside a node, sharding across nodes",
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
_MOST_MICRO_BATCHES = 64
_LARGE_TABLE = 0.5
"""Share of the parameters from which on an embedding is worth a layout of its own."""


def configs(model: Model, training: Training, cluster: Cluster) -> Iterator[ParallelConfig]:
    """Yield all of them, with each number of micro-batches, checkpointing and offload."""
    for strategy in STRATEGIES:
        for degrees in _degrees(strategy, model, training, cluster):
            yield from _with_micro_batches(training, cluster, degrees)


def _degrees(
    strategy: Strategy, model: Model, training: Training, cluster: Cluster
) -> Iterator[ParallelConfig]:
    world, node = cluster.world, cluster.gpus_per_node
    if strategy == "single":
        yield ParallelConfig("single")
    elif strategy == "dp" and node > 1 and not cluster.gpu.is_cpu:
        yield ParallelConfig("dp", data=node)
    elif strategy in {"ddp", "manual", "zero1"} and world > 1:
        yield ParallelConfig(strategy, data=world)
    elif strategy in {"zero2", "zero3"} and (world > 1 or strategy == "zero3"):
        yield ParallelConfig(strategy, data=world, shards=world)
    elif strategy == "hsdp" and cluster.nodes > 1 and node > 1:
        yield ParallelConfig("hsdp", data=world, shards=node)
    elif strategy == "sharded-table" and world > 1 and _has_large_table(model):
        yield ParallelConfig(strategy, data=world)
    elif model.layers:
        yield from _splitting(strategy, model, training, cluster)


def _splitting(
    strategy: Strategy, model: Model, training: Training, cluster: Cluster
) -> Iterator[ParallelConfig]:
    """Degrees of the strategies that split layers or divide them into stages."""
    if strategy in {"tp", "tp-dp", "fsdp-tp"}:
        yield from _tensor_parallel(strategy, model, training, cluster)
    elif strategy in {"pp", "pp-dp"}:
        yield from _pipeline_parallel(strategy, model, cluster.world)
    elif strategy == "pp-fsdp-tp":
        yield from _three_dimensions(model, training, cluster)


def _has_large_table(model: Model) -> bool:
    """Whether most parameters are an embedding that makes no logits."""
    return not model.vocabulary and model.embedding.size() > _LARGE_TABLE * model.parameters


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


def _three_dimensions(
    model: Model, training: Training, cluster: Cluster
) -> Iterator[ParallelConfig]:
    """Pipelines of sharded groups with tensor parallelism inside a node."""
    for tensor in _divisors(cluster.gpus_per_node):
        if tensor == 1 or not _divides(tensor, model, training):
            continue
        for pipeline in _divisors(cluster.world // tensor):
            data = cluster.world // (tensor * pipeline)
            if 1 < pipeline <= model.layers and data > 1:
                yield ParallelConfig(
                    "pp-fsdp-tp", data=data, tensor=tensor, pipeline=pipeline, shards=data
                )


def _with_micro_batches(
    training: Training, cluster: Cluster, degrees: ParallelConfig
) -> Iterator[ParallelConfig]:
    """The configuration with each number of micro-batches that divides a rank's samples."""
    if training.batch % degrees.data:
        return
    for micro_batches in _divisors(training.batch // degrees.data):
        if micro_batches < degrees.pipeline:
            continue  # Schedule1F1B raises ValueError: fewer micro-batches than stages
        if micro_batches > _MOST_MICRO_BATCHES * degrees.pipeline:
            break
        for switches in _switches(training, cluster, degrees):
            yield dataclasses.replace(degrees, micro_batches=micro_batches, **switches)


def _switches(
    training: Training, cluster: Cluster, degrees: ParallelConfig
) -> Iterator[dict[str, Any]]:
    """Every setting of what does not change the degrees."""
    offload = _choices(training.offload) if degrees.strategy == "zero3" else (False,)
    lora = _choices(training.lora) if degrees.strategy in _WITH_LORA else (False,)
    if training.lora and True not in lora:
        return
    for recompute, off, adapters, sent in itertools.product(
        _recomputing(training), offload, lora, _compressions(training, cluster, degrees)
    ):
        yield {**_RECOMPUTING[recompute], "offload": off, "lora": adapters, "compress": sent}


def _recomputing(training: Training) -> tuple[bool | Literal["selective"], ...]:
    return tuple(_RECOMPUTING) if training.checkpointing is None else (training.checkpointing,)


def _compressions(training: Training, cluster: Cluster, degrees: ParallelConfig) -> tuple[str, ...]:
    """Over TCP ddp can send gradients in 16 bits: bf16 where the GPU has it, which has fp32's range
    (https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html).
    """
    slow = cluster.fabric == "tcp" and cluster.nodes > 1 and not cluster.gpu.is_cpu
    if degrees.strategy != "ddp" or not slow or WEIGHT_BYTES[training.precision] == 2:  # noqa: PLR2004
        return ("",)
    return ("", "bf16" if cluster.gpu.flops["bf16"] else "fp16")


def _choices(choice: bool | None) -> tuple[bool, ...]:  # noqa: FBT001 - a three-valued option
    return (False, True) if choice is None else (choice,)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
