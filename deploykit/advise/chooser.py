"""The recommendation: which case applies, what each strategy costs, which is best.

The order is an expert's, as rules:

1. What leaves memory free comes before what fills more than 90% of it. Near the limit PyTorch's
   allocator gives blocks back and asks for them again, which stalls a step
   (https://arxiv.org/abs/2304.11277 on its rate limiter), and activations are known to 20% only.
2. What leaves layers whole (replicas, ZeRO) comes before what splits them (tensor and pipeline
   parallelism), unless that is 1.5 times as fast. Sharding needs close to no change of a model,
   splitting a plan for its layers
   (https://huggingface.co/docs/transformers/perf_train_gpu_many, scalability strategy). A factor of
   4/3 is what recomputing all activations costs; recomputing a part of them costs a few per cent
   (https://arxiv.org/abs/2205.05198, section 5); 1.1 is the tolerance of the estimates.
3. Of those that are left, the simplest within 10% of the fastest. Each stage of ZeRO needs less
   memory and is less simple (https://arxiv.org/abs/1910.02054, section 5).
4. What shards over more than 32 nodes gives way to three dimensions that shard over fewer, if those
   take at most 1.25 times as long. Every layer waits for the slowest of these nodes, which the
   estimates do not see; runs of that size divide the layers (405B on 512 H100 in torchtitan's
   benchmarks, https://arxiv.org/abs/2410.06511; Llama 3, https://arxiv.org/abs/2407.21783, 3.3.2).

Adapters (LoRA) train something else than all weights: they are chosen only where that does not fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from deploykit.advise.memory import Memory, memory
from deploykit.advise.models import Model
from deploykit.advise.speed import Step, step
from deploykit.advise.strategies import (
    FOR_TEACHING,
    STRATEGIES,
    Cluster,
    ParallelConfig,
    Strategy,
    Training,
    configs,
)

Case = Literal["each", "sharded", "layer"]
_TIGHT_SHARE = 0.9
"""Share of the memory above which a configuration is tight (rule 1)."""
_WORTH_SPLITTING = 1.5
"""How much faster it must be to split layers (rule 2)."""
_TOLERANCE = 1.1
"""Estimates within this factor count as equal; then the simpler strategy wins (rule 3)."""
_WIDE_SHARDING = 32
"""Nodes up to which sharding alone is preferred (rule 4)."""
_WORTH_STAGES = 1.25
"""How much longer three dimensions may take beyond that (rule 4)."""
_SAME_TIME = 0.97
"""Times within this ratio are called about equal."""
_MAX_NODES = 1024


@dataclass(frozen=True)
class Candidate:
    """A configuration with its estimated memory and time."""

    config: ParallelConfig
    memory: Memory
    step: Step
    fits: bool
    tight: bool = False
    """Whether it needs more than 90% of the memory."""
    reach: int = 1
    """Nodes over which its states are sharded."""

    @property
    def strategy(self) -> Strategy:
        """The name of its strategy."""
        return self.config.strategy

    @property
    def splits(self) -> bool:
        """Whether it splits layers or the sequence of layers."""
        return self.config.tensor > 1 or self.config.pipeline > 1


@dataclass(frozen=True)
class Advice:
    """The recommendation.

    `case`: "each", the whole model fits on every GPU; "sharded", only a shard of it fits;
    "layer", not even a single layer fits. `candidates`: the best configuration of each strategy
    that the cluster allows, simplest first. `best` is None if nothing fits; `enough` is then a
    number of such nodes on which something fits, or None.
    """

    model: Model
    training: Training
    cluster: Cluster
    case: Case
    candidates: tuple[Candidate, ...]
    best: Candidate | None
    second: Candidate | None
    enough: int | None

    def of(self, strategy: str) -> Candidate | None:
        """The candidate of a strategy; None if the cluster does not allow the strategy."""
        return next((each for each in self.candidates if each.strategy == strategy), None)

    def verdict(self, each: Candidate) -> str:
        """Why a candidate is not the best, by the first rule that applies."""
        best = self.best
        if best is None or not each.fits:
            return "fits" if each.fits else "does not fit"
        ratio = each.step.seconds / best.step.seconds
        if each is best:
            return "best"
        if each.strategy in FOR_TEACHING:
            return "for teaching only"
        reasons = []
        if each.config.lora and not best.config.lora:
            reasons.append("trains adapters only")
        elif each.tight and not best.tight:
            reasons.append("uses over 90% of the memory")
        elif each.splits and not best.splits:
            reasons.append("splits layers")
        elif each.reach > _WIDE_SHARDING >= best.reach:
            reasons.append(f"shards over {each.reach} nodes")
        elif ratio <= 1 / _SAME_TIME:
            reasons.append("more complex")
        if not _SAME_TIME <= ratio <= 1 / _SAME_TIME:
            reasons.append(f"{1 - ratio:.0%} faster" if ratio < 1 else f"{ratio - 1:.0%} slower")
        return ", ".join(reasons)


def advise(
    model: Model,
    training: Training,
    cluster: Cluster,
    allowed: Callable[[ParallelConfig], bool] = lambda _: True,
) -> Advice:
    """Recommend a strategy to train `model` on `cluster`, of the `allowed` configurations."""
    candidates = _candidates(model, training, cluster, allowed)
    ranked = _ranked(candidates)
    return Advice(
        model,
        training,
        cluster,
        case=_case(model, training, cluster, candidates),
        candidates=tuple(candidates),
        best=ranked[0] if ranked else None,
        second=ranked[1] if len(ranked) > 1 else None,
        enough=None if ranked else _enough(model, training, cluster, allowed),
    )


def _candidates(
    model: Model, training: Training, cluster: Cluster, allowed: Callable[[ParallelConfig], bool]
) -> list[Candidate]:
    """For each strategy its fastest configuration that is not tight, else the fastest that fits,
    else the one with least memory.
    """
    by_strategy: dict[Strategy, Candidate] = {}
    capacity = cluster.gpu.memory
    for config in filter(allowed, configs(model, training, cluster)):
        need = memory(model, training, config, capacity)
        new = Candidate(
            config,
            need,
            step(model, training, cluster, config),
            fits=need.total <= capacity,
            tight=need.total > _TIGHT_SHARE * capacity,
            reach=max(1, config.shards * config.tensor // cluster.gpus_per_node),
        )
        old = by_strategy.get(config.strategy)
        if old is None or _order(new) < _order(old):
            by_strategy[config.strategy] = new
    return [by_strategy[name] for name in STRATEGIES if name in by_strategy]


def _order(each: Candidate) -> tuple[bool, bool, bool, float]:
    """Adapters and compression change the numbers: only if needed, or if they save time."""
    size = each.step.seconds if each.fits else each.memory.total
    doubt = _TOLERANCE if each.config.compress else 1
    return (not each.fits, each.config.lora, each.tight, size * doubt)


def _ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates that fit, the best first, by the rules above; `candidates` are simplest first."""
    left = [each for each in candidates if each.fits and each.strategy not in FOR_TEACHING]
    left = [each for each in left if not each.config.lora] or left
    ranked = []
    while left:
        ranked.append(_best(left))
        left.remove(ranked[-1])
    return ranked


def _best(left: Sequence[Candidate]) -> Candidate:
    roomy = [each for each in left if not each.tight] or left
    limit = _WORTH_SPLITTING * min(each.step.seconds for each in roomy)
    whole = [each for each in roomy if not each.splits and each.step.seconds <= limit]
    pool = whole or roomy
    limit = _TOLERANCE * min(each.step.seconds for each in pool)
    best = next(each for each in pool if each.step.seconds <= limit)
    if best.splits and best.reach > _WIDE_SHARDING:  # three dimensions instead (rule 4)
        for each in pool:
            narrow = each.strategy == "pp-fsdp-tp" and each.reach <= _WIDE_SHARDING
            if narrow and each.step.seconds <= _WORTH_STAGES * best.step.seconds:
                return each
    return best


def _case(
    model: Model, training: Training, cluster: Cluster, candidates: Sequence[Candidate]
) -> Case:
    replicas = [each for each in candidates if each.strategy in {"single", "ddp"}]
    if any(each.fits and not each.config.lora for each in replicas):
        return "each"
    # the largest layer alone, gathered on one GPU, with one sample
    model, training = dataclasses.replace(model, layers=1), dataclasses.replace(training, batch=1)
    need = memory(model, training, ParallelConfig("zero3", checkpointing=True), 0)
    size = need.total - need.parameters - need.gradients - need.optimizer
    return "sharded" if size <= cluster.gpu.memory else "layer"


def _enough(
    model: Model, training: Training, cluster: Cluster, allowed: Callable[[ParallelConfig], bool]
) -> int | None:
    """The number of nodes, doubled until something fits; None if 1024 are not enough."""
    nodes = 2 * cluster.nodes
    while nodes <= _MAX_NODES:
        larger = dataclasses.replace(cluster, nodes=nodes)
        if _ranked(_candidates(model, training, larger, allowed)):
            return nodes
        nodes *= 2
    return None
