"""Cuts any model into the stages of a pipeline, between its layers.

Every stage runs the whole `forward` of the model, with the inputs of the batch, so that masks,
positions and whatever else the model derives from them are there on each rank. The layers of other
stages are hollow: the one before the first layer of a stage returns what was received from the
previous rank, the one after its last layer ends the pass. Modules with parameters outside of the
layers belong to the first stage if they are called before the layers, and to the last one if they
are called after them. Names of parameters stay those of the model.

Whether a model can be cut is tried: its stages, one after the other, must give its own outputs.
`torch.distributed.pipelining.pipeline` exports the model instead (torch 2.13). That makes constants
of what Python or numpy draw in it, and fails on branches and on outputs that are dataclasses.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainer.data import Batch
from trainer.errors import ConfigError
from trainer.objective import Objective
from trainer.parallel import layers, shards
from trainer.seeds import mixed, seed_torch
from trainer.task import scores

CPU = torch.device("cpu")
OTHER = "choose another strategy, such as fsdp"
REPEATS = 9
"""Number of measurements after a warm-up; the median counts."""


class Layer(NamedTuple):
    """A layer between two of which the model can be cut, with what it returns for a micro-batch."""

    name: str
    returned: Any
    """The structure of tensors on the meta device: shape and dtype, no data."""
    has_parameters: bool

    @property
    def hidden(self) -> Tensor:
        """The hidden states that it passes on."""
        tensor: Tensor = _hidden(self.returned)
        return tensor


class _Call(NamedTuple):
    """A call of a layer, or of a module outside of them, in a forward pass."""

    name: str
    passed: int
    """How many layers had been called before, this one included."""
    given: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: Any


class Cut:
    """A model on the CPU, with weights, that can be cut between its layers.

    They are modules that are called one after the other: the parts of an `nn.Sequential`, or those
    that `find` returns, or the obvious ones. `sample` is a micro-batch. Raises ConfigError if the
    model cannot be cut.
    """

    def __init__(
        self, model: nn.Module, find: layers.Find | None, sample: Batch, objective: Objective
    ) -> None:
        self._model = model
        self._sample = sample.to(CPU)
        self._objective = objective
        self._names = layers.names(model, find)
        if isinstance(model, nn.Sequential):
            self._names = list(vars(model)["_modules"])
        if not self._names:
            raise ConfigError(f"{type(model).__name__} has no layers to split between; {OTHER}")
        owners = list(self._owners())
        with layers.unchanged(model, CPU), torch.no_grad(), layers.evaluating(model):
            self._calls, outputs = self._trace({*self._names, *owners} - {""})
            self._check_order()
            self._before, self._after = self._outside(owners)
            self._returned = {call.name: _shapes(call.outputs) for call in reversed(self._calls)}
            self._outputs = outputs
            self._check_stages(outputs)

    @property
    def layers(self) -> list[Layer]:
        """The layers in the order in which they are called."""
        return [
            Layer(name, self._returned[name], _has_parameters(self._model.get_submodule(name)))
            for name in self._names
        ]

    def _trace(self, names: set[str]) -> tuple[list[_Call], Tensor]:
        """The calls of these modules in the order in which they ended, and the model's scores."""
        calls: list[_Call] = []
        passed = 0

        def before(_module: nn.Module, _arguments: Any) -> None:
            nonlocal passed
            passed += 1

        def after(name: str) -> Callable[..., None]:
            def record(_module: nn.Module, args: Any, options: Any, outputs: Any) -> None:
                calls.append(_Call(name, passed, (args, options), outputs))

            return record

        handles = []
        for name in names:
            module = self._model.get_submodule(name)
            handles.append(module.register_forward_hook(after(name), with_kwargs=True))
            if name in self._names:
                handles.append(module.register_forward_pre_hook(before))
        try:
            outputs = self._objective.outputs(self._model, self._sample.inputs)
        finally:
            for handle in handles:
                handle.remove()
        self.boxed = not isinstance(outputs, Tensor)
        if self.boxed and not hasattr(outputs, "logits"):
            raise ConfigError(
                "a pipeline requires a model that returns its scores, or an object with `logits`, "
                f"but {type(self._model).__name__} returns {_kind(outputs)}; {OTHER}"
            )
        return calls, scores(outputs)

    def _owners(self) -> Iterator[str]:
        """The outermost modules with parameters of their own, outside of the layers."""
        known = [*self._names]
        for name, module in self._model.named_modules():
            inside = f"{name}.".startswith(tuple(f"{each}." for each in known))
            if not inside and _has_parameters(module, recurse=False):
                known.append(name)
                yield name

    def _outside(self, owners: Sequence[str]) -> tuple[list[str], list[str]]:
        """The `owners` that are called before the layers, and after them."""
        when = {name: {call.passed for call in self._calls if call.name == name} for name in owners}
        before = [name for name in owners if when[name] == {0}]
        after = [name for name in owners if when[name] == {len(self._names)}]
        if between := [name for name in owners if name not in (*before, *after)]:
            raise ConfigError(
                f"cannot split {type(self._model).__name__} into pipeline stages: "
                f"{between[0] or 'the model'} has parameters that nothing before or after the "
                f"layers uses; {OTHER}"
            )
        return before, after

    def _check_order(self) -> None:
        """Raise ConfigError unless each layer continues the one before it."""
        ended = [call for call in self._calls if call.name in set(self._names)]
        if [call.name for call in ended] != self._names:
            self._refuse("its layers are not called exactly once each, in order")
        for previous, call in pairwise(ended):
            if next(iter(call.given[0]), None) is not _hidden(previous.outputs):
                self._refuse(f"{call.name} does not accept the output of {previous.name}")

    def _check_stages(self, outputs: Tensor) -> None:
        """Raise ConfigError unless the stages of one layer each give the model's scores."""
        hidden: tuple[Any, ...] = ()
        try:
            for number in range(len(self._names)):
                hidden = (
                    self.part(range(number, number + 1))(*hidden, inputs=self._sample.inputs),
                )
        except Exception as error:  # noqa: BLE001 - models do anything
            self._refuse(f"running a stage alone failed: {type(error).__name__}: {error}")
        if not torch.allclose(hidden[0], outputs, equal_nan=True):
            self._refuse("a value computed before its layers is also used after them")

    def _refuse(self, why: str) -> None:
        raise ConfigError(
            f"cannot split {type(self._model).__name__} into pipeline stages: {why}; {OTHER}"
        )

    def measure(self, device: torch.device) -> list[float]:
        """Seconds of each layer's forward and backward pass on `device`, for a micro-batch.

        One module at a time is there. What comes before the layers counts for the first one; what
        comes after them, and the loss, for the last one.
        """
        seconds = [0.0] * len(self._names)
        sample = self._sample.to(device)
        with layers.unchanged(self._model, device):
            for call in self._calls:
                module = self._model.get_submodule(call.name).to(device)

                def run(given: Any, module: nn.Module = module) -> Any:
                    with self._objective.autocast():
                        return module(*given[0], **given[1])

                seconds[max(call.passed - 1, 0)] += _seconds(run, call.given, device)
                module.zero_grad()
                module.cpu()
            seconds[-1] += _seconds(
                lambda given: self._objective.loss(as_returned(given, boxed=self.boxed), sample),
                self._outputs,
                device,
            )
        return seconds

    def part(self, numbers: range) -> nn.Module:
        """The stage with these layers; it shares its tensors with the model.

        Its `forward` takes the hidden states of the previous stage, unless it is the first, and the
        model's `inputs`. It returns hidden states, or the last one the scores.
        """
        first, last = numbers[0], numbers[-1]
        stage = _twin(self._model, {})
        entry: list[Any] = [None]
        for number, name in enumerate(self._names):
            if number not in numbers:
                forward = _forward(number, first, last, entry, self._returned[name])
                stage.set_submodule(name, _hollow(self._model.get_submodule(name), forward))
        for name in self._before if first > 0 else ():
            made = _placeholder(self._returned[name])
            stage.set_submodule(name, _hollow(self._model.get_submodule(name), made))
        for name in self._after if last + 1 < len(self._names) else ():
            stage.set_submodule(name, _hollow(self._model.get_submodule(name), _never))
        cls = type(stage)
        stage.__class__ = type(cls.__name__, (_Stage, cls), {})  # messages name the model
        any_stage: Any = stage
        any_stage.stage_entry, any_stage.stage_objective = entry, self._objective
        any_stage.stage_dtype = _hidden(self._returned[self._names[last]]).dtype
        return stage

    def merged(self, parts: Sequence[tuple[range, nn.Module]]) -> nn.Module:
        """One module with the parameters of these stages, by their names in the model."""
        (_, first), *others = parts
        merged = _twin(first, {}) if others else first
        for numbers, part in others:
            outside = self._after if numbers[-1] + 1 == len(self._names) else []
            for name in (*self._names[numbers[0] : numbers[-1] + 1], *outside):
                merged.set_submodule(name, part.get_submodule(name))
        return merged

    def check_tied(self, stages: Sequence[range]) -> None:
        """Raise ConfigError if a parameter is used in two of these stages."""
        for names in shards.tied(self._model):
            if len({self._place(name, stages) for name in names}) > 1:
                raise ConfigError(
                    f"{' and '.join(names)} are the same tensor in several pipeline stages: untie "
                    f"them (tie_word_embeddings=False in Hugging Face), or {OTHER}"
                )

    def _place(self, parameter: str, stages: Sequence[range]) -> int:
        for number, stage in enumerate(stages):
            own = self._names[stage[0] : stage[-1] + 1]
            if parameter.startswith(tuple(f"{name}." for name in own)):
                return number
        before = tuple(f"{name}." for name in self._before)
        return 0 if parameter.startswith(before) else len(stages) - 1


def as_returned(outputs: Tensor, *, boxed: bool) -> Any:
    """Scores as the model itself returns them: alone, or as `logits` of an object."""
    return SimpleNamespace(logits=outputs) if boxed else outputs


def split(known: Sequence[Layer], stages: int, costs: Sequence[float]) -> list[range]:
    """The numbers of the layers of each stage, such that the costliest stage costs least.

    Exact, by dynamic programming: the best division of the first n layers into s stages extends one
    of the best into s - 1. Raises ConfigError if there are fewer layers with parameters than
    stages: one without would be there for nothing.
    """
    total = [0.0, *accumulate(costs)]
    owners = [0, *accumulate(layer.has_parameters for layer in known)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for _ in range(stages):
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (slowest, bounds) in best.items():
            for end in range(begin + 1, len(known) + 1):
                if owners[end] > owners[begin]:
                    candidate = max(slowest, total[end] - total[begin]), (*bounds, end)
                    extended[end] = min(extended.get(end, candidate), candidate)
        best = extended
    if len(known) not in best:
        raise ConfigError(
            f"cannot make {stages} pipeline stages from {owners[-1]} layers with parameters: "
            "use fewer ranks, a smaller --stages-per-rank, or a model with more layers"
        )
    return [range(*ends) for ends in pairwise(best[len(known)][1])]


def _seconds(run: Callable[[Any], Any], given: Any, device: torch.device) -> float:
    """The median time of a forward and a backward pass of `run`."""

    def fresh(leaf: Tensor) -> Tensor:
        moved = leaf.detach().to(device)
        return moved.requires_grad_(moved.is_floating_point()).clone()  # may be changed in place

    times = []
    for _ in range(1 + REPEATS):
        own = pytree.tree_map_only(Tensor, fresh, given)
        started = _synchronized_time(device)
        leaves = pytree.tree_leaves(run(own))
        ends = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        times.append(_synchronized_time(device) - started)
    return statistics.median(times[1:])


def _synchronized_time(device: torch.device) -> float:
    """The current time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


class _Done(Exception):
    """Ends a forward pass after the last layer of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Stage(nn.Module):
    """What makes a stage of a model; mixed into its class, whose `forward` it uses."""

    stage_entry: list[Any]
    stage_objective: Objective
    stage_dtype: torch.dtype

    def forward(self, *hidden: Tensor, inputs: Any) -> Tensor:
        """Hidden states of the previous stage, if there is one, to those of the next, or scores."""
        self.stage_entry[:] = hidden or [None]
        model: Any = super().forward
        try:
            result = scores(self.stage_objective.outputs(model, inputs))
        except _Done as done:  # of the dtype that the next stage expects, as traced on a CPU
            result = done.hidden.to(self.stage_dtype).contiguous()
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

    def forward(*given: Any, **options: Any) -> Any:
        leaves = pytree.tree_leaves((given, options))
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))

        def missing(leaf: Tensor) -> Tensor:
            value = float("nan") if leaf.is_floating_point() else 0
            return torch.full(leaf.shape, value, dtype=leaf.dtype, device=device)

        return pytree.tree_map_only(Tensor, missing, returned)

    return forward


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this module is in the last stage")


def _has_parameters(module: nn.Module, *, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None


def _hidden(outputs: Any) -> Any:
    """The hidden states that a layer returns: alone, or as the first of several values."""
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def _like(outputs: Any, hidden: Any) -> Any:
    """Hidden states as a layer returns them that returned `outputs`: what it adds is None."""
    if isinstance(outputs, tuple | list):
        return type(outputs)((hidden, *(None for _ in outputs[1:])))
    return hidden


def _shapes(outputs: Any) -> Any:
    """The same structure with contiguous tensors, which can be sent, that have no memory."""

    def shape(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)

    return pytree.tree_map_only(Tensor, shape, outputs)


def _kind(outputs: Any) -> str:
    """What outputs are, in words."""
    name = type(outputs).__name__
    return f"a {name} of {len(outputs)} values" if isinstance(outputs, tuple | list) else name


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
    made = layers.twin(module)
    vars(made).update(_parameters={}, _buffers={}, _modules={}, forward=forward, hollow=True)
    return made
