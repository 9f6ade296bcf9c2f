"""The recommendation: which case applies, what each strategy costs, which is best."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from deploykit.advise.configs import FOR_TEACHING, STRATEGIES, configs
from deploykit.advise.memory import Memory, memory
from deploykit.advise.model_shape import Model
from deploykit.advise.traffic import Step, step
from deploykit.advise.workload import Cluster, ParallelConfig, Strategy, Training

Case = Literal["each", "sharded", "layer"]
_TOLERANCE = 1.1
"""Estimates within this factor count as equal; then the simpler strategy wins."""
_MAX_NODES = 1024


@dataclass(frozen=True)
class Candidate:
    """A configuration with its estimated memory and time."""

    config: ParallelConfig
    memory: Memory
    step: Step
    fits: bool

    @property
    def strategy(self) -> Strategy:
        """The name of its strategy."""
        return self.config.strategy


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


def advise(model: Model, training: Training, cluster: Cluster) -> Advice:
    """Recommend a strategy to train `model` on `cluster`."""
    candidates = _candidates(model, training, cluster)
    ranked = _ranked(candidates)
    return Advice(
        model,
        training,
        cluster,
        case=_case(model, training, cluster, candidates),
        candidates=tuple(candidates),
        best=ranked[0] if ranked else None,
        second=ranked[1] if len(ranked) > 1 else None,
        enough=None if ranked else _enough(model, training, cluster),
    )


def _candidates(model: Model, training: Training, cluster: Cluster) -> list[Candidate]:
    """For each strategy its fastest configuration that fits, else the one with least memory."""
    by_strategy: dict[Strategy, Candidate] = {}
    for config in configs(model, training, cluster):
        need = memory(model, training, config, cluster.gpu.memory)
        fits = need.total <= cluster.gpu.memory
        new = Candidate(config, need, step(model, training, cluster, config), fits)
        old = by_strategy.get(config.strategy)
        if old is None or _order(new) < _order(old):
            by_strategy[config.strategy] = new
    return [by_strategy[name] for name in STRATEGIES if name in by_strategy]


def _order(each: Candidate) -> tuple[bool, float]:
    return (not each.fits, each.step.seconds if each.fits else each.memory.total)


def _ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates that fit, best first; of about equally fast ones the simplest comes first."""
    left = [each for each in candidates if each.fits and each.strategy not in FOR_TEACHING]
    ranked = []
    while left:
        fastest = min(each.step.seconds for each in left)
        chosen = next(each for each in left if each.step.seconds <= _TOLERANCE * fastest)
        ranked.append(chosen)
        left.remove(chosen)
    return ranked


def _case(
    model: Model, training: Training, cluster: Cluster, candidates: Sequence[Candidate]
) -> Case:
    replicated = {"single", "ddp"}
    if any(each.fits for each in candidates if each.strategy in replicated):
        return "each"
    return "sharded" if layer_memory(model, training) <= cluster.gpu.memory else "layer"


def layer_memory(model: Model, training: Training) -> int:
    """Bytes of the largest layer alone, gathered on one GPU, with one sample."""
    one = dataclasses.replace(training, batch=1)
    config = ParallelConfig("zero3", checkpointing=True)
    need = memory(dataclasses.replace(model, layers=1), one, config, 0)
    return need.total - need.parameters - need.gradients - need.optimizer


def _enough(model: Model, training: Training, cluster: Cluster) -> int | None:
    """The number of nodes, doubled until something fits; None if 1024 are not enough."""
    nodes = 2 * cluster.nodes
    while nodes <= _MAX_NODES:
        larger = dataclasses.replace(cluster, nodes=nodes)
        if _ranked(_candidates(model, training, larger)):
            return nodes
        nodes *= 2
    return None
