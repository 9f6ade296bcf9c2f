"""Recompute activations in the backward pass: less memory for more work.

https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_aten: Any = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default}
_KEPT = {
    _aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 - torch's names of operators
    _aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
    _aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
    _aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
}
"""Attention costs more than it stores."""
_COLLECTIVES = ("_c10d_functional::", "c10d_functional::")
"""Namespaces of operators: what has been received is not sent again."""


def recompute(model: nn.Module, layers: Sequence[str], how: str) -> None:
    """Recompute the activations of these layers, in place; `how` is "full" or "selective".

    The names of parameters stay as they are. Selective recomputation keeps the results of
    attention, of collectives and of every second matrix product.
    """
    options: dict[str, Any] = {"context_fn": _keep_expensive} if how == "selective" else {}
    for name in layers:
        layer: Any = model.get_submodule(name)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


def _keep_expensive() -> Any:
    """The contexts of one forward pass of a layer and of its recomputation."""
    return create_selective_checkpoint_contexts(_Policy())


class _Policy:
    """Decides for each operator whether its result is kept; counts the products of both passes."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Callable[..., Any], *_: Any, **__: Any) -> Any:
        if operator in _PRODUCTS:
            self._products[context.is_recompute] += 1
            keep = self._products[context.is_recompute] % 2 == 1
        else:
            keep = operator in _KEPT or str(operator).startswith(_COLLECTIVES)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
