"""Context parallelism: ranks work on the same samples, each on a part of every sequence.

Rank r of n has positions r/n to (r+1)/n of each sequence. What a model does with a position alone
needs no other rank. Attention does: while the model runs, each call of
`torch.nn.functional.scaled_dot_product_attention` first gathers the keys and values of all parts,
and a causal mask uses positions in the whole sequence. In the backward pass their gradients are
reduce-scattered. This is the context parallelism of Llama 3 (https://arxiv.org/abs/2407.21783,
section 3.3.2), but with one part for each rank: under a causal mask the last rank does the most.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, _functional_collectives
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from trainer.data import Batch
from trainer.errors import ConfigError
from trainer.objective import Objective
from trainer.parallel import shards
from trainer.parallel.layers import evaluating
from trainer.parallel.process_group import refuse_together
from trainer.setup import Setup
from trainer.task import Task, is_integer

POSITIONS = "position_ids"
"""The parameter of a model's `forward` for positions; models of Hugging Face name it so."""

CHECKED = 16
"""How many positions of a part are compared with the whole, for each rank of tensor parallelism."""
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Settings of Hugging Face's models that limit how far attention reaches."""
TOLERANCES = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02, "float8": 0.3}
"""By precision: how far outputs and loss may be from those of whole sequences, relative to the
largest. Rounding leaves a hundredth of it."""

_torch: Any = _functional_collectives  # it has another name since torch 2.13
_gather = getattr(_torch, "all_gather_single_autograd", None) or _torch.all_gather_tensor_autograd


class ContextParallel:
    """Part `index` of the sequences of `group`, and the attention between the parts."""

    def __init__(self, task: Task, group: ProcessGroup, index: int) -> None:
        self.task = task
        self.group = group
        self.index = index
        self.size = group.size()
        self.calls = 0
        """How often attention has been computed."""
        self.window: int | None = None
        """How far attention of the model reaches, if that is limited."""
        self._active = self._suspended = False
        self._causal_masks: dict[int, Tensor] = {}

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Let attention in the block be that of the whole sequence."""
        if self._active or self._suspended:
            yield
            return
        self._active = True
        try:
            with _Attention(self):
                yield
        finally:
            self._active = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let a model in the block run on whole sequences, as without this."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def cover(self, model: nn.Module, layers: Sequence[str]) -> None:
        """Let these layers have that attention also where a backward pass computes them again.

        The mode of a forward pass is not active then: a backward pass is a function of torch, for
        which torch suspends it.
        """
        for name in layers:
            layer: Any = model.get_submodule(name)
            layer.forward = partial(self._forward, layer.forward)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.attention():
            return forward(*args, **kwargs)

    def give_positions(self, model: nn.Module) -> bool:
        """Pass positions in the whole sequence to the parts of `model` that take `position_ids`.

        Only to the outermost ones, which pass them on. Returns whether there are any.
        """
        takers: list[str] = []
        for name, module in model.named_modules():
            parameters = list(inspect.signature(type(module).forward).parameters)[1:]
            if POSITIONS in parameters and not any(
                not outer or name.startswith(f"{outer}.") for outer in takers
            ):
                takers.append(name)
                hook = partial(self._add_positions, parameters.index(POSITIONS))
                module.register_forward_pre_hook(hook, with_kwargs=True)
        return bool(takers)

    def _add_positions(
        self, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = kwargs.get(POSITIONS) is not None or len(args) > index
        if given or not self._active:
            return None
        leaves = pytree.tree_leaves((args, kwargs))
        inputs = next(each for each in leaves if isinstance(each, Tensor) and each.dim() > 1)
        length = inputs.shape[1]
        first = self.index * length
        positions = torch.arange(first, first + length, device=inputs.device).unsqueeze(0)
        return args, kwargs | {POSITIONS: positions}

    def attend(  # noqa: PLR0913, PLR0917 - as torch has it
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - as torch has it
        **options: Any,
    ) -> Tensor:
        """Attention of the queries of this part over the keys and values of all parts.

        All three are (..., length, size), of a part. Dropout is drawn for each query, so ranks draw
        different ones. Raises ConfigError for what cannot be computed so.
        """
        self.calls += 1
        length = query.shape[-2]
        _check(query, key)
        key, value = (_whole(each, self.group) for each in (key, value))
        if is_causal:
            past = slice((self.index + 1) * length)
            key, value = key[..., past, :], value[..., past, :]
            attn_mask = self.causal_mask(length)
        elif attn_mask is not None:
            attn_mask = self._mask(attn_mask, length)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, **options
        )

    def causal_mask(self, length: int) -> Tensor:
        """That of a part of this length and the parts before it: kernels know it, it has no data.

        It is made before the model runs, as torch (2.13) cannot make one while activations are
        recomputed selectively.
        """
        if length not in self._causal_masks:
            self._causal_masks[length] = causal_lower_right(length, (self.index + 1) * length)
        return self._causal_masks[length]

    def _mask(self, mask: Tensor, length: int) -> Tensor:
        """The rows of this part's queries, of a mask (..., queries, keys)."""
        whole = length * self.size
        rows, keys = mask.shape[-2:] if mask.dim() > 1 else (0, 0)
        if keys not in (1, whole) or rows not in (1, length, whole):
            raise ConfigError(
                f"--context-parallel: the attention mask of shape {tuple(mask.shape)} does not "
                f"cover the {whole} keys of the whole sequence. Use is_causal=True, which needs no "
                "mask for trailing padding, or a mask that covers all keys"
            )
        if rows == whole:
            return mask[..., self.index * length : (self.index + 1) * length, :]
        return mask

    def part(self, batch: Batch) -> Batch:
        """Return the part of every sequence in a batch for this rank; all parts are as long.

        Raises ConfigError if the sequences cannot be divided.
        """
        length = _length(batch)
        if length % self.size:
            longer = -(-length // self.size) * self.size
            raise ConfigError(
                f"--context-parallel {self.size} does not divide sequences of {length} positions: "
                f"pad them to {longer} in the task's collate, with targets of -100"
            )
        if self.window and length > self.window:
            raise ConfigError(
                f"--context-parallel does not support sliding-window attention ({self.window} "
                f"of {length} positions): use shorter sequences, or another strategy"
            )
        size = length // self.size
        self.causal_mask(size)
        inputs, targets = self._slice(batch, slice(self.index * size, (self.index + 1) * size))
        count = self.task.targets_in(targets) * (batch.count > 0)
        if self.task.count is None and not is_integer(targets):  # samples count in equal parts
            count = torch.as_tensor(batch.count) / self.size
        return Batch(inputs, targets, count, batch.total)

    def _slice(self, batch: Batch, positions: slice) -> Any:
        """Inputs and targets of these positions."""
        both = (batch.inputs, batch.targets)
        if self.task.slice_sequence is not None:
            return self.task.slice_sequence(both, positions)
        length = _length(batch)
        return pytree.tree_map_only(Tensor, lambda leaf: _slice_leaf(leaf, length, positions), both)

    def prepare(self, model: nn.Module, sample: Batch) -> None:
        """Let `model` have positions in the whole sequence, in place. Collective.

        Raises ConfigError, on all ranks, if it cannot be trained on parts of sequences.
        """
        problem = ""
        try:
            self._prepare(model, sample)
        except ConfigError as error:  # of this rank's samples
            problem = str(error)
        refuse_together(problem)

    def _prepare(self, model: nn.Module, sample: Batch) -> None:
        has_positions = self.give_positions(model)
        self.window = _window(model)
        if self.task.slice_sequence is None:
            _check_names(sample.inputs)
            if not has_positions:
                raise ConfigError(
                    f"--context-parallel: no part of {type(model).__name__} takes {POSITIONS}, so "
                    "a rank cannot pass the position where its part of a sequence begins: add "
                    "this parameter, of shape (1, sequence), to `forward`, or define "
                    "Task.slice_sequence if positions are among the inputs"
                )
        leaves = pytree.tree_leaves(sample.targets)
        if not any(isinstance(leaf, Tensor) and leaf.dim() > 1 for leaf in leaves):
            raise ConfigError(
                "--context-parallel requires a target for each position, not one for each sample: "
                "choose another strategy, such as fsdp"
            )
        self.part(sample)

    @torch.no_grad()
    def check(self, model: nn.Module, setup: Setup) -> None:
        """Compare parts of the sample's first positions with the whole, in evaluation. Collective.

        Raises ConfigError if outputs, loss or number of targets differ, which finds what mixes
        positions without `scaled_dot_product_attention`, and losses that shift their targets.
        """
        longest = _length(setup.sample) // self.size
        length = min(longest, CHECKED * setup.layout.dims.tp)
        inputs, targets = self._slice(setup.sample, slice(0, length * self.size))
        whole = Batch(inputs, targets, self.task.targets_in(targets), 1)
        part = self.part(whole)
        before = self.calls
        with evaluating(model):
            with self.suspended():
                expected = _results(setup.objective, model, whole)
            divided = _results(setup.objective, model, part)
        called = self.calls > before
        worst = self._worst_difference(expected, divided, length, called=called)
        if not called:
            raise ConfigError(
                "--context-parallel requires a model that calls scaled_dot_product_attention, but "
                "this one does not: for transformers models, set attn_implementation='sdpa'"
            )
        if not worst <= TOLERANCES[setup.options.precision]:
            raise ConfigError(
                f"--context-parallel: outputs or loss differ by {worst:.1e} from the results for "
                "whole sequences. Something other than scaled_dot_product_attention mixes "
                "positions, the model does not use its position_ids, or the loss shifts its "
                "targets: shift them in the data instead, or choose another strategy"
            )

    def _worst_difference(
        self,
        expected: tuple[Any, Tensor],
        divided: tuple[Any, Tensor],
        length: int,
        *,
        called: bool,
    ) -> float:
        """How far outputs, loss and number of targets are off on any rank, relatively. Collective.

        `divided` has those of a part of this `length`. The result is 1 if a rank has not `called`
        attention.
        """
        distributed.all_reduce(divided[1], group=self.group)
        differences = [_difference(*pair) for pair in zip(expected[1], divided[1], strict=True)]
        whole, own = (_scores(outputs) for outputs, _ in (expected, divided))
        if whole is not None and own is not None and whole.shape[1] == length * self.size:
            first = self.index * length
            differences.append(_difference(whole[:, first : first + length], own))
        worst = torch.stack([*differences, differences[0].new_tensor(not called)]).max()
        distributed.all_reduce(worst, distributed.ReduceOp.MAX)
        return float(worst)


class _Attention(TorchFunctionMode):
    """Calls `attend` for attention in its block, and any other function of torch as it is."""

    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._context.attend(*args, **(kwargs or {}))
        if func is functional.multi_head_attention_forward:  # its attention is not seen from here
            raise ConfigError(
                "--context-parallel does not support nn.MultiheadAttention: use a layer that calls "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        return func(*args, **(kwargs or {}))


def _check(query: Tensor, key: Tensor) -> None:
    """Raise ConfigError if the keys are not those of the positions of the queries."""
    if hasattr(query, "device_mesh"):
        raise ConfigError(
            "--context-parallel requires attention on plain tensors, not on DTensors: in the "
            "tensor-parallel plan, set use_local_output=True for the layers before attention"
        )
    if key.shape[-2] != query.shape[-2]:
        raise ConfigError(
            f"--context-parallel divides self-attention only, but here {query.shape[-2]} queries "
            f"attend to {key.shape[-2]} keys: choose another strategy for this model"
        )


def _whole(part: Tensor, group: ProcessGroup) -> Tensor:
    """Gather parts (..., length, size) along the sequence; gradients are summed over the ranks."""
    if torch.is_autocast_enabled(part.device.type):  # as attention would do it afterwards
        part = part.to(torch.get_autocast_dtype(part.device.type))
    parts: Tensor = _gather(part.contiguous(), 0, group)
    return torch.cat(parts.chunk(group.size()), dim=-2)


def _length(batch: Batch) -> int:
    """The number of positions: the second size of the first tensor of the targets that has one."""
    for leaf in pytree.tree_leaves((batch.targets, batch.inputs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 1:
            return leaf.shape[1]
    raise ConfigError(
        "--context-parallel requires tensors of shape (batch, sequence, ...): choose another "
        "strategy"
    )


def _slice_leaf(leaf: Tensor, length: int, positions: slice) -> Tensor:
    if leaf.dim() < 2:  # noqa: PLR2004 - one value for each sample
        return leaf
    if leaf.shape[1] != length:
        raise ConfigError(
            f"--context-parallel: a tensor in the batch has shape {tuple(leaf.shape)}, not "
            f"(batch, {length}, ...) like the targets: define Task.slice_sequence"
        )
    return leaf[:, positions]


def _window(model: nn.Module) -> int | None:
    """How far attention reaches in any layer, if its configuration limits that."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    windows = [getattr(config, name, None) for config in configs for name in WINDOWS]
    return min((each for each in windows if isinstance(each, int)), default=None)


def _check_names(inputs: Any) -> None:
    """Raise ConfigError if a batch has what other parts of a sequence would need."""
    reasons = {
        "attention_mask": "causal attention needs no mask for trailing padding (targets of -100)",
        POSITIONS: "the trainer passes them to the model",
    }
    for name, reason in reasons.items():
        if isinstance(inputs, Mapping) and inputs.get(name) is not None:
            raise ConfigError(
                f"--context-parallel: leave {name} out of the batch: {reason}. If it "
                "carries other information, such as document boundaries, define Task.slice_sequence"
            )


def _results(objective: Objective, model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
    """Outputs; loss and number of targets."""
    outputs = shards.whole(objective.outputs(model, batch.inputs))
    loss = objective.loss(outputs, batch)
    return outputs, torch.stack([loss, torch.as_tensor(batch.count).to(loss)])


def _difference(expected: Tensor, actual: Tensor) -> Tensor:
    """The largest difference relative to the largest value."""
    difference = (expected.double() - actual.double()).abs().max()
    return difference / expected.double().abs().max().clamp(min=1e-9)


def _scores(outputs: Any) -> Tensor | None:
    """The outputs for each position, if there are any."""
    scores = getattr(outputs, "logits", outputs)
    return scores if isinstance(scores, Tensor) and scores.dim() > 1 else None
