"""Cuts a model into stages of a pipeline: an `nn.Sequential` between its parts, others by trial."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.data import Batch
from trainer.errors import ConfigError
from trainer.objective import Objective
from trainer.parallel import layers, parallelize, partition, shards
from trainer.parallel.cut_forward import OTHER, ForwardCut
from trainer.parallel.partition import MeasuredLayer
from trainer.setup import Setup


class Cut(Protocol):
    """A model that can be cut between its layers, which are numbered from 0."""

    needs_inputs: bool
    boxed: bool

    def measure(self) -> list[MeasuredLayer]:
        """Time each layer with one micro-batch."""

    def part(self, numbers: Sequence[int]) -> nn.Module:
        """The stage with these layers, consecutive numbers."""

    def merged(self, parts: Sequence[tuple[Sequence[int], nn.Module]]) -> nn.Module:
        """One module with the parameters of stages, by their names in the model."""

    def check_tied(self, stages: Sequence[Sequence[int]]) -> None:
        """Raise ConfigError if a parameter is used in two of these stages."""


def cut(setup: Setup, sample: Batch) -> Cut:
    """Build the whole model, with weights, in CPU memory; `sample` is a micro-batch.

    Raises ConfigError if it cannot be cut.
    """
    model = setup.weights.build()
    setup.weights.fill(model, torch.device("cpu"))
    if isinstance(model, nn.Sequential):
        parallelize.prepare_layers(model, setup)
        return SequentialCut(model, sample, setup.objective)
    names = layers.names(model, setup.task.layers)
    if not names:
        raise ConfigError(f"{type(model).__name__} has no layers to cut between; {OTHER}")
    return ForwardCut(model, names, sample.to(torch.device("cpu")), setup.objective)


class SequentialCut:
    """The parts of an `nn.Sequential`, on the device of the sample while they are measured."""

    needs_inputs = boxed = False

    def __init__(self, model: nn.Sequential, sample: Batch, objective: Objective) -> None:
        self._model = model
        self._sample = sample
        self._objective = objective
        self._children = list(model.named_children())

    def measure(self) -> list[MeasuredLayer]:
        """Time each layer alone; see `partition.measure_layers`."""
        objective, sample = self._objective, self._sample
        return partition.measure_layers(
            self._model,
            sample.inputs,
            objective.outputs,
            lambda scores: objective.loss(scores, sample),
        )

    def part(self, numbers: Sequence[int]) -> nn.Module:
        """The layers as a sequence."""
        return _Stage(OrderedDict(self._children[number] for number in numbers), self._objective)

    def names(self, numbers: Sequence[int]) -> list[str]:
        """The layers by name."""
        return [self._children[number][0] for number in numbers]

    def merged(self, parts: Sequence[tuple[Sequence[int], nn.Module]]) -> nn.Module:
        """All layers of the stages as a sequence."""
        children = (child for _, part in parts for child in part.named_children())
        return nn.Sequential(OrderedDict(children))

    def check_tied(self, stages: Sequence[Sequence[int]]) -> None:
        """Raise ConfigError if a parameter is used in two of these stages."""
        stage_of = {name: n for n, stage in enumerate(stages) for name in self.names(stage)}
        for names in shards.tied(self._model):
            if len({stage_of[name.partition(".")[0]] for name in names}) > 1:
                raise ConfigError(
                    f"{' and '.join(names)} are one tensor, in several stages of the pipeline: "
                    f"untie them, or {OTHER}"
                )


class _Stage(nn.Sequential):
    """Consecutive layers, run in the precision of the run."""

    def __init__(self, named: OrderedDict[str, nn.Module], objective: Objective) -> None:
        super().__init__(named)
        self._autocast = objective.autocast

    def forward(self, inputs: Tensor) -> Tensor:
        """Hidden states of the previous stage to those of the next."""
        with self._autocast():
            outputs: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs.contiguous()
