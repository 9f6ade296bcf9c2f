"""How to train, on which hardware, and one configuration of the parallelism. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from deploykit.advise.gpus import Gpu

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
