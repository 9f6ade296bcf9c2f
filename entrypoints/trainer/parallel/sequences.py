"""The part of a batch that a rank has with context parallelism, and whether a model allows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from trainer.data import Batch
from trainer.errors import ConfigError
from trainer.objective import Objective
from trainer.parallel import shards
from trainer.parallel.context_parallel import POSITIONS, ContextParallel
from trainer.probe import evaluating
from trainer.setup import Setup
from trainer.task import Task, is_integer

CHECKED = 16
"""How many positions of a part are compared with the whole, for each rank of tensor parallelism."""
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Settings of Hugging Face's models that limit how far attention reaches."""
TOLERANCES = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02, "float8": 0.3}
"""By precision: how far outputs and loss may be from those of whole sequences, relative to the
largest. Rounding leaves a hundredth of it."""


def part(batch: Batch, task: Task, context: ContextParallel) -> Batch:
    """A rank's part of every sequence in a batch, with as many positions as the others have.

    Raises ConfigError if the sequences cannot be divided so.
    """
    length = _length(batch)
    if length % context.size:
        longer = -(-length // context.size) * context.size
        raise ConfigError(
            f"--context-parallel {context.size} does not divide sequences of {length} positions: "
            f"pad them, with targets of -100, to {longer} in the task's collate"
        )
    if context.window and length > context.window:
        raise ConfigError(
            f"--context-parallel does not support sliding-window attention, here {context.window} "
            f"of {length} positions: use shorter sequences, or another strategy"
        )
    size = length // context.size
    context.causal_mask(size)
    inputs, targets = _slice(batch, task, slice(context.index * size, (context.index + 1) * size))
    return Batch(inputs, targets, _count(batch, targets, task, context.size), batch.total)


def _count(batch: Batch, targets: Any, task: Task, parts: int) -> int | Tensor:
    """The targets that count in a part. Samples are counted in equal parts."""
    if task.count is None and not is_integer(targets):
        return torch.as_tensor(batch.count) / parts
    return task.targets_in(targets) * (batch.count > 0)


def _length(batch: Batch) -> int:
    """The number of positions: the second size of the first tensor of the targets that has one."""
    for leaf in pytree.tree_leaves((batch.targets, batch.inputs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 1:
            return leaf.shape[1]
    raise ConfigError(
        "--context-parallel requires sequences: tensors (batch, sequence, ...); choose another "
        "strategy"
    )


def _slice(batch: Batch, task: Task, positions: slice) -> Any:
    """Inputs and targets of these positions."""
    both = (batch.inputs, batch.targets)
    if task.slice_sequence is not None:
        return task.slice_sequence(both, positions)
    length = _length(batch)
    return pytree.tree_map_only(Tensor, lambda leaf: _slice_leaf(leaf, length, positions), both)


def _slice_leaf(leaf: Tensor, length: int, positions: slice) -> Tensor:
    if leaf.dim() < 2:  # noqa: PLR2004 - one value for each sample
        return leaf
    if leaf.shape[1] != length:
        raise ConfigError(
            f"--context-parallel: a tensor of shape {tuple(leaf.shape)} in a batch is not "
            f"(batch, {length}, ...) like the targets: give Task.slice_sequence"
        )
    return leaf[:, positions]


def prepare(model: nn.Module, setup: Setup) -> None:
    """Let `model` have positions in the whole sequence, in place. Collective.

    Raises ConfigError, on all ranks, if it cannot be trained on parts of sequences.
    """
    problem = ""
    try:
        _prepare(model, setup)
    except ConfigError as error:  # of this rank's samples
        problem = str(error)
    problems: list[str] = [""] * setup.context.world_size
    distributed.all_gather_object(problems, problem)
    if any(problems):
        raise ConfigError(next(filter(None, problems)))


def _prepare(model: nn.Module, setup: Setup) -> None:
    context, task, sample = setup.context_parallel, setup.task, setup.sample
    assert context is not None  # noqa: S101 - the caller asks first
    has_positions = context.give_positions(model)
    context.window = _window(model)
    if task.slice_sequence is None:
        _check_names(sample.inputs)
        if not has_positions:
            raise ConfigError(
                f"--context-parallel: no part of {type(model).__name__} takes {POSITIONS}, so a "
                "rank cannot tell it where its part of a sequence begins: add this parameter, of "
                "shape (1, sequence), to `forward`, or give Task.slice_sequence if positions are "
                "among the inputs"
            )
    leaves = pytree.tree_leaves(sample.targets)
    if not any(isinstance(leaf, Tensor) and leaf.dim() > 1 for leaf in leaves):
        raise ConfigError(
            "--context-parallel requires a target for each position, not one for each sample: "
            "choose another strategy, such as fsdp"
        )
    part(sample, task, context)


def _window(model: nn.Module) -> int | None:
    """How far attention reaches in any layer, if its configuration limits that."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    windows = [getattr(config, name, None) for config in configs for name in WINDOWS]
    return min((each for each in windows if isinstance(each, int)), default=None)


def _check_names(inputs: Any) -> None:
    """Raise ConfigError if a batch has what other parts of a sequence would need."""
    reasons = {
        "attention_mask": "causal attention needs none for padding at the end, where targets are "
        "-100",
        POSITIONS: "they are passed to the model",
    }
    for name, reason in reasons.items():
        if isinstance(inputs, Mapping) and inputs.get(name) is not None:
            raise ConfigError(
                f"--context-parallel: leave {name} out of the batch: {reason}. If it says more "
                "than that, such as where documents begin, give Task.slice_sequence"
            )


@torch.no_grad()
def check(model: nn.Module, setup: Setup) -> None:
    """Compare parts of the sample's first positions with the whole, in evaluation. Collective.

    Raises ConfigError if outputs, loss or number of targets differ, which finds what mixes
    positions without `scaled_dot_product_attention`, and losses that shift their targets.
    """
    context, task, sample = setup.context_parallel, setup.task, setup.sample
    assert context is not None  # noqa: S101 - the caller asks first
    longest = _length(sample) // context.size
    length = min(longest, CHECKED * setup.layout.dims.tp)
    inputs, targets = _slice(sample, task, slice(0, length * context.size))
    whole = Batch(inputs, targets, task.targets_in(targets), 1)
    own = part(whole, task, context)
    before = context.calls
    with evaluating(model):
        with context.suspended():
            expected = _results(setup.objective, model, whole)
        results = _results(setup.objective, model, own)
    calls = context.calls - before
    _raise_if_unequal(setup, expected, results, length=length, calls=calls)


def _results(objective: Objective, model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
    """Outputs; loss and number of targets."""
    outputs = shards.whole(objective.outputs(model, batch.inputs))
    loss = objective.loss(outputs, batch)
    return outputs, torch.stack([loss, torch.as_tensor(batch.count).to(loss)])


def _raise_if_unequal(
    setup: Setup,
    expected: tuple[Any, Tensor],
    results: tuple[Any, Tensor],
    *,
    length: int,
    calls: int,
) -> None:
    context = setup.context_parallel
    assert context is not None  # noqa: S101 - the caller asks first
    distributed.all_reduce(results[1], group=context.group)
    first = context.index * length
    differences = [_difference(*pair) for pair in zip(expected[1], results[1], strict=True)]
    whole, own = (_scores(outputs) for outputs, _ in (expected, results))
    if whole is not None and own is not None and whole.shape[1] == length * context.size:
        differences.append(_difference(whole[:, first : first + length], own))
    worst = torch.stack([*differences, torch.tensor(float(calls == 0)).to(differences[0])]).max()
    distributed.all_reduce(worst, distributed.ReduceOp.MAX)
    if calls == 0:
        raise ConfigError(
            "--context-parallel requires a model that calls scaled_dot_product_attention, and this "
            "one does not: models of transformers do with attn_implementation='sdpa'"
        )
    if not float(worst) <= TOLERANCES[setup.options.precision]:
        raise ConfigError(
            f"--context-parallel: outputs or loss differ by {float(worst):.1e} from those of whole "
            "sequences. Something besides scaled_dot_product_attention mixes positions, the model "
            "does not use its position_ids, or the loss shifts its targets: shift them in the "
            "data, and choose another strategy for such models"
        )


def _difference(expected: Tensor, actual: Tensor) -> Tensor:
    """The largest difference relative to the largest value."""
    difference = (expected.double() - actual.double()).abs().max()
    return difference / expected.double().abs().max().clamp(min=1e-9)


def _scores(outputs: Any) -> Tensor | None:
    """The outputs for each position, if there are any."""
    scores = getattr(outputs, "logits", outputs)
    return scores if isinstance(scores, Tensor) and scores.dim() > 1 else None
