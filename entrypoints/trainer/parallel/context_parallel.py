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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from trainer.errors import ConfigError

POSITIONS = "position_ids"
"""The parameter of a model's `forward` for positions; models of Hugging Face name it so."""

_torch: Any = distributed  # these two have other names since torch 2.13
_all_gather = getattr(_torch, "all_gather_single", None) or _torch.all_gather_into_tensor
_reduce_scatter = getattr(_torch, "reduce_scatter_single", None) or _torch.reduce_scatter_tensor


class ContextParallel:
    """Part `index` of the sequences of `group`, and the attention between the parts."""

    def __init__(self, group: ProcessGroup, index: int) -> None:
        self.group = group
        self.index = index
        self.size = group.size()
        self.calls = 0
        """How often attention has been computed."""
        self.window: int | None = None
        """How far attention of the model reaches, if that is limited."""
        self._active = False
        self._suspended = False
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
            if POSITIONS in parameters and not any(_is_inside(name, outer) for outer in takers):
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

    def attend(
        self,
        qkv: Sequence[Tensor],
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
        query, *rest = qkv
        length = query.shape[-2]
        _check(query, rest[0])
        key, value = (_whole(each, self.group) for each in rest)
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
                f"cover the {whole} keys of the whole sequence. Use is_causal=True, which needs "
                "no mask for padding at the end, or a mask for all keys"
            )
        if rows == whole:
            return mask[..., self.index * length : (self.index + 1) * length, :]
        return mask


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
            return _attend(self._context, *args, **(kwargs or {}))
        if func is functional.multi_head_attention_forward:  # its attention is not seen from here
            raise ConfigError(
                "--context-parallel cannot compute nn.MultiheadAttention: use a layer that calls "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        return func(*args, **(kwargs or {}))


def _attend(
    context: ContextParallel, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
) -> Tensor:
    return context.attend((query, key, value), *rest, **named)


def _check(query: Tensor, key: Tensor) -> None:
    """Raise ConfigError if the keys are not those of the positions of the queries."""
    if hasattr(query, "device_mesh"):
        raise ConfigError(
            "--context-parallel requires attention on plain tensors, not on DTensors: in the plan "
            "for tensor parallelism, let the layers before it have use_local_output=True"
        )
    if key.shape[-2] != query.shape[-2]:
        raise ConfigError(
            f"--context-parallel divides self-attention only, and here {query.shape[-2]} queries "
            f"meet {key.shape[-2]} keys: choose another strategy for this model"
        )


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _whole(part: Tensor, group: ProcessGroup) -> Tensor:
    """Gather parts (..., length, size) along the sequence."""
    if torch.is_autocast_enabled(part.device.type):  # as attention would do it afterwards
        part = part.to(torch.get_autocast_dtype(part.device.type))
    whole: Tensor = _Gather.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    """The parts of all ranks, one after the other; their gradients are summed over the ranks."""

    @staticmethod
    def forward(context: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        """Gather along the last dimension but one. Collective."""
        context.group = group
        parts = part.new_empty(group.size(), *part.shape)
        _all_gather(parts.view(-1), part.reshape(-1), group=group)
        return parts.movedim(0, -3).flatten(-3, -2)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of this rank's part. Collective."""
        group: ProcessGroup = context.group
        parts = gradients[0].unflatten(-2, (group.size(), -1)).movedim(-3, 0).contiguous()
        own = torch.empty_like(parts[0])
        _reduce_scatter(own.view(-1), parts.view(-1), group=group)
        return own, None
