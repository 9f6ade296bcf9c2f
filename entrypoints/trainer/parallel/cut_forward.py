"""Cuts a model that is no sequence of layers, such as one of Hugging Face, between its layers.

Every stage runs the whole `forward` of the model, with the inputs of the batch, so that masks,
positions and whatever else the model derives from them are there on each rank. The layers of other
stages are hollow: the one before the first layer of a stage returns what was received from the
previous rank, the one after its last layer ends the pass. Modules with parameters outside of the
layers belong to the first stage if they are called before the layers, and to the last one if they
are called after them. Names of parameters stay those of the model.

Whether a model can be cut is tried: its stages, one after the other, must give its own outputs.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainer.data import Batch
from trainer.errors import ConfigError
from trainer.objective import Objective
from trainer.parallel import layers, partition, shards
from trainer.parallel.partition import REPEATS, MeasuredLayer
from trainer.probe import evaluating, unchanged
from trainer.seeds import mixed, seed_torch
from trainer.task import scores

OTHER = "choose another strategy, such as fsdp"


class _Call(NamedTuple):
    """A call of a module in a forward pass."""

    name: str
    passed: int
    """How many layers had been called before."""
    hidden: Any
    """Its first argument, or None."""
    outputs: Any


class ForwardCut:
    """A model whose layers have these `names`, modules that are called one after the other.

    `sample` is a micro-batch. Raises ConfigError if the model cannot be cut between the layers.
    """

    needs_inputs = True
    """Whether each stage needs the inputs of the batch, too."""
    boxed: bool
    """Whether the model returns its scores as `logits` of an object."""

    def __init__(
        self, model: nn.Module, names: Sequence[str], sample: Batch, objective: Objective
    ) -> None:
        self._model = model
        self._layers = list(names)
        self._sample = sample
        self._objective = objective
        with unchanged(model, torch.device("cpu")), torch.no_grad(), evaluating(model):
            calls, outputs = self._trace()
            self._check_order(calls)
            self._before, self._after = self._outside(calls)
            self._returned = {call.name: _shapes(call.outputs) for call in reversed(calls)}
            self._check_stages(outputs)

    def _trace(self) -> tuple[list[_Call], Tensor]:
        """The calls of one forward pass in the order in which they ended, and its scores."""
        calls: list[_Call] = []
        passed = 0

        def before(_module: nn.Module, _arguments: Any, _options: Any) -> None:
            nonlocal passed
            passed += 1

        def after(name: str) -> Callable[..., None]:
            def record(_module: nn.Module, given: Any, outputs: Any) -> None:
                calls.append(_Call(name, passed, next(iter(given), None), outputs))

            return record

        modules = [(name, module) for name, module in self._model.named_modules() if name]
        handles = [module.register_forward_hook(after(name)) for name, module in modules]
        for name in self._layers:
            layer = self._model.get_submodule(name)
            handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        try:
            outputs = self._objective.outputs(self._model, self._sample.inputs)
        finally:
            for handle in handles:
                handle.remove()
        self.boxed = not isinstance(outputs, Tensor)
        if self.boxed and not hasattr(outputs, "logits"):
            raise ConfigError(
                f"a pipeline requires a model that returns its scores, or an object with `logits`, "
                f"and {type(self._model).__name__} returns {partition.kind(outputs)}; {OTHER}"
            )
        return calls, scores(outputs)

    def _outside(self, calls: Sequence[_Call]) -> tuple[list[str], list[str]]:
        """The modules with parameters that are called before the layers, and after them."""
        called: dict[str, set[int]] = {name: set() for name in self._owners()}
        for call in calls:
            if call.name in called:
                called[call.name].add(call.passed)
        before = [name for name, when in called.items() if when == {0}]
        after = [name for name, when in called.items() if when == {len(self._layers)}]
        if between := [name for name in called if name not in (*before, *after)]:
            raise ConfigError(
                f"a pipeline cannot cut {type(self._model).__name__}: {between[0] or 'the model'} "
                "has parameters that are not used by a part of it before the layers or after "
                f"them; {OTHER}"
            )
        return before, after

    def _owners(self) -> Iterator[str]:
        """The outermost modules with parameters of their own, outside of the layers."""
        known = [*self._layers]
        for name, module in self._model.named_modules():
            inside = f"{name}.".startswith(tuple(f"{each}." for each in known))
            if not inside and next(module.parameters(recurse=False), None) is not None:
                known.append(name)
                yield name

    def _check_order(self, calls: Sequence[_Call]) -> None:
        """Raise ConfigError unless each layer continues the one before it."""
        ended = [call for call in calls if call.name in set(self._layers)]
        if [call.name for call in ended] != self._layers:
            self._refuse("its layers are not called once each, in their order")
        for previous, call in pairwise(ended):
            if call.hidden is not _hidden(previous.outputs):
                self._refuse(f"{call.name} does not take what {previous.name} returns")

    def _check_stages(self, outputs: Tensor) -> None:
        """Raise ConfigError unless the stages of one layer each give the model's scores."""
        hidden: Any = None
        try:
            for number in range(len(self._layers)):
                hidden = self.part([number])(*() if hidden is None else (hidden,), inputs=self._in)
        except Exception as error:  # noqa: BLE001 - models do anything
            self._refuse(f"without its other layers it fails, with {type(error).__name__}: {error}")
        if not torch.allclose(hidden, outputs):
            self._refuse("what comes before its layers is used after them too")

    def _refuse(self, why: str) -> None:
        raise ConfigError(
            f"a pipeline cannot cut {type(self._model).__name__} between its layers: {why}; {OTHER}"
        )

    @property
    def _in(self) -> Any:
        return self._sample.inputs

    def measure(self) -> list[MeasuredLayer]:
        """Time the layers in forward and backward passes of the model.

        What comes before them counts for the first one; what comes after, and the loss, for the
        last one. The backward pass is distributed like the forward pass.
        """
        with unchanged(self._model, torch.device("cpu")):
            rounds = [self._measure_once() for _ in range(1 + REPEATS)]
        self._model.zero_grad()
        by_layer = zip(*rounds[1:], strict=True)
        seconds = [statistics.median(each) for each in by_layer]
        return [
            MeasuredLayer(name, each, _hidden(self._returned[name]), True)
            for name, each in zip(self._layers, seconds, strict=True)
        ]

    def _measure_once(self) -> list[float]:
        marks: list[float] = []
        handles = [
            self._model.get_submodule(name).register_forward_hook(
                lambda *_: marks.append(perf_counter())
            )
            for name in self._layers
        ]
        started = perf_counter()
        loss = self._objective.loss(self._objective.outputs(self._model, self._in), self._sample)
        forward = perf_counter()
        torch.autograd.backward(loss)
        ended = perf_counter()
        for handle in handles:
            handle.remove()
        bounds = [started, *marks[:-1], forward]
        stretch = (ended - started) / (forward - started)
        return [(after - before) * stretch for before, after in pairwise(bounds)]

    def part(self, numbers: Sequence[int]) -> nn.Module:
        """The stage with these layers, consecutive numbers; it shares its tensors with the model.

        Its `forward` takes the hidden states of the previous stage, unless it is the first, and the
        model's `inputs`. It returns hidden states, or the last one the scores.
        """
        own = {self._layers[number] for number in numbers}
        first, last = numbers[0], numbers[-1]
        stage = _twin(self._model, {})
        entry: list[Any] = [None]
        for number, name in enumerate(self._layers):
            if name not in own:
                forward = _forward(number, first, last, entry, self._returned[name])
                stage.set_submodule(name, _hollow(self._model.get_submodule(name), forward))
        for name in self._elsewhere(first, last):
            made = _placeholder(self._returned[name]) if name in self._before else _never
            stage.set_submodule(name, _hollow(self._model.get_submodule(name), made))
        cls = type(stage)
        stage.__class__ = type(cls.__name__, (_Stage, cls), {})  # messages name the model
        any_stage: Any = stage
        any_stage.stage_entry, any_stage.stage_objective = entry, self._objective
        return stage

    def _elsewhere(self, first: int, last: int) -> Iterator[str]:
        """The modules outside of the layers that other stages have."""
        if first > 0:
            yield from self._before
        if last + 1 < len(self._layers):
            yield from self._after

    def names(self, numbers: Sequence[int]) -> list[str]:
        """The layers of a stage by name."""
        return [self._layers[number] for number in numbers]

    def merged(self, parts: Sequence[tuple[Sequence[int], nn.Module]]) -> nn.Module:
        """One module with the parameters of these stages, by their names in the model.

        Raises ConfigError if one parameter is in two stages.
        """
        stages = [part for _, part in parts]
        merged = stages[0] if len(stages) == 1 else _twin(stages[0], {})
        for numbers, part in parts[1:]:
            outside = self._after if numbers[-1] + 1 == len(self._layers) else []
            for name in (*self.names(numbers), *outside):
                merged.set_submodule(name, part.get_submodule(name))
        return merged

    def check_tied(self, stages: Sequence[Sequence[int]]) -> None:
        """Raise ConfigError if a parameter is used in two of these stages."""
        for names in shards.tied(self._model):
            numbers = {self._place(name, stages) for name in names}
            if len(numbers) > 1:
                raise ConfigError(
                    f"{' and '.join(names)} are one tensor, in several stages of the pipeline: "
                    f"untie them (tie_word_embeddings=False in Hugging Face), or {OTHER}"
                )

    def _place(self, parameter: str, stages: Sequence[Sequence[int]]) -> int:
        for number, stage in enumerate(stages):
            if parameter.startswith(tuple(f"{name}." for name in self.names(stage))):
                return number
        before = tuple(f"{name}." for name in self._before)
        return 0 if parameter.startswith(before) else len(stages) - 1


class _Done(Exception):
    """Ends a forward pass after the last layer of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Stage(nn.Module):
    """What makes a stage of a model; mixed into its class, whose `forward` it uses."""

    stage_entry: list[Any]
    stage_objective: Objective

    def forward(self, *hidden: Tensor, inputs: Any) -> Tensor:
        """Hidden states of the previous stage, if there is one, to those of the next, or scores."""
        self.stage_entry[:] = hidden or [None]
        model: Any = super().forward
        try:
            result = scores(self.stage_objective.outputs(model, inputs))
        except _Done as done:
            result = done.hidden.contiguous()
        finally:
            self.stage_entry[:] = [None]
        return result


def _forward(
    number: int, first: int, last: int, entry: list[Any], returned: Any
) -> Callable[..., Any]:
    """What layer `number` does in a stage that has only the layers from `first` to `last`."""

    def skip(hidden: Any, *_: Any, **__: Any) -> Any:
        if number != first - 1:
            return _like(returned, hidden)
        # stages draw the same before the layers, such as a mask, and their own within them
        seed_torch(mixed(int(torch.randint(2**31, ())), first))
        return _like(returned, entry[0])

    def stop(hidden: Any, *_: Any, **__: Any) -> Any:
        raise _Done(hidden)

    return stop if number == last + 1 else skip


def _placeholder(returned: Any) -> Callable[..., Any]:
    """Returns new tensors like these, whose values are not numbers, and which may be changed."""

    def missing(tensor: Tensor) -> Tensor:
        value = float("nan") if tensor.is_floating_point() else 0
        return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)

    empty = pytree.tree_map_only(Tensor, missing, returned)

    def forward(*given: Any, **options: Any) -> Any:
        tensors = (
            leaf for leaf in pytree.tree_leaves((given, options)) if isinstance(leaf, Tensor)
        )
        device = next(tensors).device
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device).contiguous(), empty)

    return forward


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this module is in the last stage")


def _hidden(outputs: Any) -> Any:
    """The hidden states that a layer returns: alone, or as the first of several values."""
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def _like(outputs: Any, hidden: Any) -> Any:
    """Hidden states as a layer returns them that returned `outputs`: what it adds is None."""
    if isinstance(outputs, tuple | list):
        return type(outputs)((hidden, *(None for _ in outputs[1:])))
    return hidden


def _shapes(outputs: Any) -> Any:
    """The same structure with tensors that have no memory."""
    return pytree.tree_map_only(Tensor, partition.shape, outputs)


def _twin(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """A model of the same tensors, whose modules can be replaced at any depth."""
    if module not in done:
        done[module] = made = layers.twin(module)
        parts = vars(made)["_modules"]
        parts.update({name: part and _twin(part, done) for name, part in parts.items()})
    return done[module]


def _hollow(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A module with the attributes of another, but without its tensors, that calls `forward`.

    Its attribute `hollow` says so.
    """
    made = copy.copy(module)
    vars(made).update(_parameters={}, _buffers={}, _modules={}, forward=forward, hollow=True)
    return made
