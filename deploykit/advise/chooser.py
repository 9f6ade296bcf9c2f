"""The choice: which case holds, what every strategy would need, which is best."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from deploykit.advise.layouts import STRATEGIES, TAUGHT, layouts
from deploykit.advise.memory import Memory, memory
from deploykit.advise.plan import Cluster, Layout, Strategy, Training
from deploykit.advise.shape import Model
from deploykit.advise.traffic import Step, step

Case = Literal["each", "sharded", "layer"]
_CLOSE = 1.1
"""Estimates this near each other count as equal: the simpler strategy wins."""
_MOST_NODES = 1024


@dataclass(frozen=True)
class Candidate:
    """One layout with what it needs and takes."""

    layout: Layout
    memory: Memory
    step: Step
    fits: bool

    @property
    def strategy(self) -> Strategy:
        return self.layout.strategy


@dataclass(frozen=True)
class Advice:
    """The answer. `case`: "each", a whole copy fits on every GPU; "sharded", only a part of one
    does; "layer", not even a single layer does.

    `candidates`: for each strategy that these machines allow its best layout, simplest first.
    `best` is None where nothing fits; `enough` is then a number of nodes of this kind with which
    something does, or None.
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
        return next((each for each in self.candidates if each.strategy == strategy), None)


def advise(model: Model, training: Training, cluster: Cluster) -> Advice:
    """Which strategy to train `model` with, on these machines."""
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
    """For each strategy its fastest layout that fits, else the one that needs least memory."""
    found: dict[Strategy, Candidate] = {}
    for layout in layouts(model, training, cluster):
        need = memory(model, training, layout, cluster.gpu.memory)
        fits = need.total <= cluster.gpu.memory
        new = Candidate(layout, need, step(model, training, cluster, layout), fits)
        old = found.get(layout.strategy)
        if old is None or _order(new) < _order(old):
            found[layout.strategy] = new
    return [found[name] for name in STRATEGIES if name in found]


def _order(each: Candidate) -> tuple[bool, float]:
    return (not each.fits, each.step.seconds if each.fits else each.memory.total)


def _ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """What can be recommended, the best first: the simplest of the about equally fast ones."""
    left = [each for each in candidates if each.fits and each.strategy not in TAUGHT]
    ranked = []
    while left:
        fastest = min(each.step.seconds for each in left)
        chosen = next(each for each in left if each.step.seconds <= _CLOSE * fastest)
        ranked.append(chosen)
        left.remove(chosen)
    return ranked


def _case(
    model: Model, training: Training, cluster: Cluster, candidates: Sequence[Candidate]
) -> Case:
    whole = {"single", "ddp"}
    if any(each.fits for each in candidates if each.strategy in whole):
        return "each"
    return "sharded" if layer_need(model, training) <= cluster.gpu.memory else "layer"


def layer_need(model: Model, training: Training) -> int:
    """Bytes of the largest layer alone, gathered on one GPU, with one sample and nothing else."""
    one = dataclasses.replace(training, batch=1)
    layout = Layout("zero3", checkpointing=True)
    need = memory(dataclasses.replace(model, layers=1), one, layout, 0)
    return need.total - need.parameters - need.gradients - need.optimizer


def _enough(model: Model, training: Training, cluster: Cluster) -> int | None:
    """The least power of two times these nodes on which something fits."""
    nodes = 2 * cluster.nodes
    while nodes <= _MOST_NODES:
        larger = dataclasses.replace(cluster, nodes=nodes)
        if _ranked(_candidates(model, training, larger)):
            return nodes
        nodes *= 2
    return None
