"""Where a pipeline is cut: layers measured on this device, stages as equal in time as they allow.

A pipeline is as fast as its slowest stage, and layers differ far more than their number tells.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor, nn

REPEATS = 9
"""Of the measurement, after one that warms up. The median counts."""

NOISE = 0.02
"""Cuts whose slowest stages differ by less are equally good: the one that sends less is taken."""


@dataclass(frozen=True)
class Layer:
    """What a layer costs for one micro-batch: seconds of forward and backward, and what it sends.

    `out` is its output without content, on the meta device. With activation checkpointing the
    seconds include the second forward.
    """

    name: str
    seconds: float
    out: Tensor
    learns: bool

    @property
    def bytes(self) -> int:
        return self.out.numel() * self.out.element_size()


Cut = Sequence[Sequence[Layer]]


def measure(
    model: nn.Sequential,
    inputs: Tensor,
    forward: Callable[[nn.Module, Tensor], Tensor],
    loss: Callable[[Tensor], Tensor],
) -> list[Layer]:
    """Run each layer alone, on the device of `inputs`, a micro-batch; the last one with the loss.

    Round after round, so that a slow moment of the machine touches all alike. Layers come to the
    device one by one: a model larger than it can be measured.
    """
    rounds = [list(_round(model, inputs, forward, loss)) for _ in range(1 + REPEATS)]
    return [
        Layer(
            name,
            statistics.median(seconds for seconds, _ in found[1:]),
            found[0][1],
            _learns(layer),
        )
        for (name, layer), *found in zip(model.named_children(), *rounds, strict=True)
    ]


def _round(
    model: nn.Sequential,
    inputs: Tensor,
    forward: Callable[[nn.Module, Tensor], Tensor],
    loss: Callable[[Tensor], Tensor],
) -> Iterator[tuple[float, Tensor]]:
    """Each layer's seconds of forward and backward, and its output without content."""
    for number, layer in enumerate(model, 1):
        home = next((parameter.device for parameter in layer.parameters()), inputs.device)
        layer.to(inputs.device)
        began = _now(inputs.device)
        out = forward(layer, inputs)
        end = loss(out) if number == len(model) else out
        if end.requires_grad:
            end.backward(torch.ones_like(end))
        yield _now(inputs.device) - began, torch.empty_like(out, device="meta")
        layer.to(home)
        layer.zero_grad()
        inputs = out.detach().requires_grad_(out.is_floating_point())


def _learns(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _now(device: torch.device) -> float:
    """With all that the device was given done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def by_time(layers: Sequence[Layer], stages: int) -> list[list[Layer]]:
    """Cut into `stages` so that the slowest is as fast as can be, and then so that least is sent.

    Exact: the best cut of the first n layers into s stages follows from the best ones into s - 1.
    """
    seconds = [layer.seconds for layer in layers]
    limit = _best(layers, stages, max, lambda a, b: sum(seconds[a:b]))[0] * (1 + NOISE)

    def sent(a: int, b: int) -> float:
        return layers[b - 1].bytes if sum(seconds[a:b]) <= limit else math.inf

    return _stages(layers, _best(layers, stages, lambda x, y: x + y, sent)[1])


def by_layers(layers: Sequence[Layer], stages: int) -> list[list[Layer]]:
    """The same with layers that are thought to take equally long."""
    return _stages(layers, _best(layers, stages, max, lambda a, b: b - a)[1])


def _best(
    layers: Sequence[Layer],
    stages: int,
    join: Callable[[float, float], float],
    cost: Callable[[int, int], float],
) -> tuple[float, tuple[int, ...]]:
    """The least cost, joined over all stages, and where each of them ends.

    A stage without parameters has nothing to learn, so none is made.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(stages):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (before, ends) in best.items():
            for end in range(begin + 1, len(layers) + 1):
                if any(layer.learns for layer in layers[begin:end]):
                    found = join(before, cost(begin, end)), (*ends, end)
                    longer[end] = min(longer.get(end, found), found)
        best = longer
    if len(layers) not in best:
        learning = sum(layer.learns for layer in layers)
        raise ValueError(
            f"{stages} pipeline stages cannot be cut from {learning} layers with parameters: "
            "use fewer ranks or --stages-per-rank, or a model with more layers"
        )
    return best[len(layers)]


def _stages(layers: Sequence[Layer], ends: Sequence[int]) -> list[list[Layer]]:
    return [list(layers[begin:end]) for begin, end in pairwise((0, *ends))]
