"""Partition of a model into pipeline stages of about equal time, measured on this device.

A pipeline is as fast as its slowest stage, and the cost of layers differs far more than their
number suggests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.probe import unchanged

REPEATS = 9
"""Number of measurements after a warm-up; the median counts."""

TOLERANCE = 0.02
"""Partitions whose slowest stages differ by less count as equal; the one that sends least wins."""


@dataclass(frozen=True)
class MeasuredLayer:
    """The cost of a layer for one micro-batch.

    `seconds` is the time of its forward and backward pass, with a second forward pass under
    activation checkpointing. `output` is on the meta device: shape and dtype, no data.
    """

    name: str
    seconds: float
    output: Tensor
    has_parameters: bool

    @property
    def output_bytes(self) -> int:
        """Size of the activations that the layer passes on."""
        return self.output.numel() * self.output.element_size()


Stages = Sequence[Sequence[MeasuredLayer]]


def measure_layers(
    model: nn.Sequential,
    inputs: Tensor,
    forward: Callable[[nn.Module, Tensor], Tensor],
    loss: Callable[[Tensor], Tensor],
) -> list[MeasuredLayer]:
    """Time each layer of `model` by itself with one micro-batch, on the device of `inputs`.

    The last layer is timed together with `loss`. All layers are measured once per round, so that a
    slow moment of the machine affects all of them alike. One layer at a time is on the device, so
    the model may be larger than its memory. Buffers, such as the statistics of batch
    normalization, and the state of the random numbers are left as they were.
    """
    with unchanged(model, inputs.device):
        rounds = [list(_measure_once(model, inputs, forward, loss)) for _ in range(1 + REPEATS)]
    return [
        MeasuredLayer(
            name,
            statistics.median(seconds for seconds, _ in measurements[1:]),
            measurements[0][1],
            _has_parameters(layer),
        )
        for (name, layer), *measurements in zip(model.named_children(), *rounds, strict=True)
    ]


def _measure_once(
    model: nn.Sequential,
    inputs: Tensor,
    forward: Callable[[nn.Module, Tensor], Tensor],
    loss: Callable[[Tensor], Tensor],
) -> Iterator[tuple[float, Tensor]]:
    """Seconds of each layer's forward and backward pass, and its output on the meta device."""
    for number, layer in enumerate(model, 1):
        original = next((parameter.device for parameter in layer.parameters()), inputs.device)
        layer.to(inputs.device)
        started = _synchronized_time(inputs.device)
        output = forward(layer, inputs)
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"a pipeline passes on one tensor, and layer {number} of the model "
                f"({type(layer).__name__}) returns {kind(output)}; choose another strategy, such "
                "as fsdp"
            )
        end = loss(output) if number == len(model) else output
        if end.requires_grad:
            torch.autograd.backward(end, torch.ones_like(end))
        yield _synchronized_time(inputs.device) - started, shape(output)
        layer.to(original)
        layer.zero_grad()
        inputs = output.detach().requires_grad_(output.is_floating_point())


def _has_parameters(layer: nn.Module) -> bool:
    return next(layer.parameters(), None) is not None


def shape(tensor: Tensor) -> Tensor:
    """A contiguous tensor of this shape without memory: only such ones can be sent."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)


def kind(outputs: Any) -> str:
    """What outputs are, in words."""
    name = type(outputs).__name__
    return f"a {name} of {len(outputs)} values" if isinstance(outputs, tuple | list) else name


def _synchronized_time(device: torch.device) -> float:
    """The current time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def by_time(layers: Sequence[MeasuredLayer], stages: int) -> list[list[MeasuredLayer]]:
    """Minimize the time of the slowest stage; among equal partitions, the bytes that are sent.

    Exact, by dynamic programming: the best partition of the first n layers into s stages extends
    one of the best partitions into s - 1. Raises ConfigError if there are too few layers.
    """
    seconds = [layer.seconds for layer in layers]
    slowest, _ = _best(layers, stages, max, lambda a, b: sum(seconds[a:b]))
    limit = slowest * (1 + TOLERANCE)

    def bytes_sent(a: int, b: int) -> float:
        return layers[b - 1].output_bytes if sum(seconds[a:b]) <= limit else math.inf

    return _split(layers, _best(layers, stages, lambda x, y: x + y, bytes_sent)[1])


def by_layers(layers: Sequence[MeasuredLayer], stages: int) -> list[list[MeasuredLayer]]:
    """The same with the number of layers in place of their time."""
    return _split(layers, _best(layers, stages, max, lambda a, b: b - a)[1])


def _best(
    layers: Sequence[MeasuredLayer],
    stages: int,
    combine: Callable[[float, float], float],
    cost: Callable[[int, int], float],
) -> tuple[float, tuple[int, ...]]:
    """The lowest combined cost of all stages, and the index at which each stage ends.

    Stages without parameters are not allowed: they would be there for nothing.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(stages):
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (previous, ends) in best.items():
            for end in range(begin + 1, len(layers) + 1):
                if any(layer.has_parameters for layer in layers[begin:end]):
                    candidate = combine(previous, cost(begin, end)), (*ends, end)
                    extended[end] = min(extended.get(end, candidate), candidate)
        best = extended
    if len(layers) not in best:
        available = sum(layer.has_parameters for layer in layers)
        raise ConfigError(
            f"cannot make {stages} pipeline stages of {available} layers with parameters: "
            "use fewer ranks or --stages-per-rank, or a model with more layers"
        )
    return best[len(layers)]


def _split(layers: Sequence[MeasuredLayer], ends: Sequence[int]) -> list[list[MeasuredLayer]]:
    return [list(layers[begin:end]) for begin, end in pairwise((0, *ends))]
