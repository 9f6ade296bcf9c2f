"""Tensor parallelism: ranks work on the same samples, each with a slice of every large layer.

Of two consecutive linear layers, the first is sharded by outputs and the second by inputs, so that
one all-reduce serves both. With sequence parallelism, what lies between (normalization, residual
additions) is sharded along the sequence, and the all-reduce becomes a reduce-scatter and an
all-gather: the same traffic, less memory.

Ranks that share a layer draw the same random numbers, so that what they all hold stays equal. But
between a layer that is sharded by outputs and the next one that is sharded by inputs, each has
activations of its own, such as other heads of attention. There dropout must draw a mask of its own
on each rank: otherwise the heads that ranks have at the same place would lose the same weights.
With sequence parallelism ranks also have different positions of what lies between such layers.

https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.errors import ConfigError
from trainer.parallel import shards
from trainer.parallel.process_group import divisors
from trainer.seeds import SEED_STEP, seed_torch
from trainer.setup import Setup
from trainer.train_options import TrainOptions


def apply(part: nn.Module, setup: Setup) -> None:
    """Shard the layers of a model, or of a stage, in place; tied weights stay tied.

    Raises ConfigError if there is no plan, or if it does not fit the model.
    """
    tied = shards.tied(part)
    plan = _plan(part, setup)
    styles = {name: style for words, style in plan.items() for name in _modules(part, words)}
    if not setup.preset.pipeline:  # a stage has some modules of the plan, or none
        _check(part, plan, styles, own=setup.task.tensor_parallel is not None)
    parallelize_module(part, setup.layout.mesh.axes("tp"), styles)
    if setup.options.task not in _PLANS:  # our own models draw nothing
        _draw_apart(part, styles, setup.layout.position.tp)
    for names in tied:
        shards.tie(part, names)


def finish_gradients(model: nn.Module) -> None:
    """Reduce gradients that are still partial sums, of layers sharded along the sequence."""
    for parameter in model.parameters():
        gradient, data = parameter.grad, parameter.data
        if not isinstance(gradient, DTensor) or not isinstance(data, DTensor):
            continue  # unused, frozen, or not in the plan: the same on all ranks
        if gradient.placements != data.placements:
            parameter.grad = gradient.redistribute(placements=data.placements)


def _plan(model: nn.Module, setup: Setup) -> Mapping[str, ParallelStyle]:
    """The plan of the task, or of the model itself. Raises ConfigError if there is none."""
    if own := _PLANS.get(setup.options.task):
        return own(setup.options)
    if setup.task.tensor_parallel is not None:
        return setup.task.tensor_parallel(model)
    return _plan_of_hugging_face(model, setup.layout.dims.tp, setup.options)


def _check(model: nn.Module, plan: Iterable[str], styles: Collection[str], *, own: bool) -> None:
    """Raise ConfigError if `plan` names modules that the model does not have.

    A plan of transformers serves several models: of it, one module is enough.
    """
    unknown = [words for words in plan if not any(_modules(model, words))]
    if not unknown or (styles and not own):
        return
    known = [name for name, _ in model.named_modules()]
    alike = get_close_matches(unknown[0], known, 1)
    hint = f": did you mean {alike[0]}?" if alike else ""
    raise ConfigError(
        f"the tensor-parallel plan names {unknown[0]}, which {type(model).__name__} does "
        f"not have{hint}"
    )


def _modules(model: nn.Module, pattern: str) -> Iterator[str]:
    """The names of modules like `pattern`, whose parts may have asterisks.

    Those of other stages of a pipeline, which are hollow here, are left out.
    """
    parts = pattern.split(".")
    for name, module in model.named_modules():
        names = name.split(".")
        alike = len(names) == len(parts) and all(map(fnmatch, names, parts))
        if alike and not getattr(module, "hollow", False):
            yield name


class ReplicatedLayer(ParallelStyle):
    """A layer that every rank holds and computes in full.

    Its parameters are DTensors like all others, because optimizers and norms that process many
    tensors at once refuse a mixture.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        to_tensor: Any = self._to_tensor  # torch uses its result, unlike its annotation says
        return distribute_module(
            module, device_mesh, input_fn=self._to_dtensor, output_fn=to_tensor
        )

    @staticmethod
    def _to_dtensor(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
        return tuple(
            DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in inputs
        )

    @staticmethod
    def _to_tensor(_module: nn.Module, outputs: DTensor, _mesh: DeviceMesh) -> Tensor:
        return outputs.to_local()


def _digits_plan(_options: TrainOptions) -> dict[str, ParallelStyle]:
    return {
        "conv*": ReplicatedLayer(),
        "hidden": ColwiseParallel(),
        "scores": RowwiseParallel(),
    }


def _text_plan(options: TrainOptions) -> dict[str, ParallelStyle]:
    """`between` attention and MLP, hidden states are replicated or sharded along the sequence."""
    between = Shard(1) if options.sequence_parallel else Replicate()
    gather = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    norm = SequenceParallel() if options.sequence_parallel else ReplicatedLayer()
    return {
        "embed.byte": RowwiseParallel(input_layouts=Replicate()),
        "embed.position": ReplicatedLayer(),
        "embed": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=between),
        "block*.norm1": norm,
        "block*.attention": gather,
        "block*.attention.query": ColwiseParallel(),
        "block*.attention.key": ColwiseParallel(),
        "block*.attention.value": ColwiseParallel(),
        "block*.attention.out": RowwiseParallel(output_layouts=between),
        "block*.norm2": norm,
        "block*.feed": gather,
        "block*.feed.up": ColwiseParallel(),
        "block*.feed.down": RowwiseParallel(output_layouts=between),
        "head.norm": norm,
        "head.scores": _scores(options, between),
    }


def _scores(options: TrainOptions, inputs: Replicate | Shard | None = None) -> ColwiseParallel:
    """The last layer: scores for all classes, or for those of this rank with --loss-parallel."""
    if options.loss_parallel:
        return ColwiseParallel(
            input_layouts=inputs, output_layouts=Shard(-1), use_local_output=False
        )
    return ColwiseParallel(input_layouts=inputs, output_layouts=Replicate())


def _plan_of_hugging_face(
    model: nn.Module, ranks: int, options: TrainOptions
) -> dict[str, ParallelStyle]:
    """The plan that a model of transformers brings. Raises ConfigError if it does not fit.

    The words are those of its `base_model_tp_plan`; other layers stay whole on each rank.
    """
    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "colwise_rep": _scores(options),
        "colwise_gather_output": _scores(options),
    }
    words: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    plan = {name: styles[word] for name, word in words.items() if word in styles}
    if not plan:
        raise ConfigError(
            f"{type(model).__name__} has no tensor-parallel plan: return one for "
            "`parallelize_module` from Task.tensor_parallel, or choose another strategy, such as "
            "fsdp"
        )
    config: Any = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or ranks
        if heads % ranks:
            raise ConfigError(
                f"{name} {heads} of {type(model).__name__} cannot be divided by {ranks} ranks, "
                f"only by {divisors(heads)}"
            )
    return plan


_PLANS = {"digits": _digits_plan, "text": _text_plan}


def _draw_apart(part: nn.Module, styles: Mapping[str, ParallelStyle], rank: int) -> None:
    """Let each rank draw its own random numbers between sharded layers.

    `styles` are those of the modules of `part` by name, `rank` is that among those of a layer.
    """
    stream = _Stream(rank)
    if any(isinstance(style, SequenceParallel) for style in styles.values()):
        part.register_forward_pre_hook(stream.begin)
    else:
        _between_sharded_layers(part, styles, stream)
    part.register_forward_hook(stream.end)


def _between_sharded_layers(
    part: nn.Module, styles: Mapping[str, ParallelStyle], stream: _Stream
) -> None:
    """Begin after a layer that is sharded by outputs, end before the next one by inputs."""
    opened = False
    for name, module in part.named_modules():
        style = styles.get(name)
        if isinstance(style, ColwiseParallel) and any(
            isinstance(each, Shard) for each in style.output_layouts
        ):
            module.register_forward_hook(stream.begin)
            opened = True
        elif isinstance(style, RowwiseParallel) and opened:
            module.register_forward_pre_hook(stream.end)
            opened = False


class _Stream:
    """A stream of random numbers for one rank, beside that of all ranks of a layer."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: list[Tensor] = []
        """The states of the generators that all ranks share, while this rank uses its own."""
        self.begin: Any = torch.compiler.disable(self._begin)
        """Any forward hook. Compiled code would not see that the state changes, so it is left."""
        self.end: Any = torch.compiler.disable(self._end)

    def _begin(self, module: nn.Module, *_: Any) -> None:
        """Use this rank's own numbers, which follow from the common ones.

        So they are the same where a layer is computed again, with the state that it had before.
        """
        if self._common or not module.training:
            return
        seed = int(torch.randint(2**31, ())) * SEED_STEP + self._rank
        self._common = _states()
        seed_torch(seed)

    def _end(self, *_: Any) -> None:
        """Use the common numbers again."""
        if not self._common:
            return
        torch.set_rng_state(self._common[0])
        if len(self._common) > 1:
            torch.cuda.set_rng_state(self._common[1])
        self._common = []


def _states() -> list[Tensor]:
    """The states of the generators of the CPU and of the current GPU, if one is used."""
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpu]
