"""Matrix products in float8, by torchao: for GPUs on which they are faster than those of bf16.

Everything else is as with bf16: weights, what is sent, and other operators. Each operand is scaled
by its largest value on this rank.
https://docs.pytorch.org/ao/stable/workflows/training.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from trainer.errors import ConfigError

MULTIPLE = 16
"""Of which the sizes of a weight must be multiples (`torch._scaled_mm`)."""
CAPABILITY = (8, 9)
"""Of the first GPUs with such products: L4, L40S, H100."""


def convert(model: nn.Module, layers: Sequence[str], device: torch.device) -> None:
    """Let the linear layers of these layers compute in float8, in place; CPUs emulate it, slowly.

    Raises ConfigError where that is not possible.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError("--precision float8 requires torchao: pip install torchao") from error
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ConfigError("--precision float8 requires a GPU such as L4 or H100: use bf16")
    chosen = set(_linear(model, layers))
    if not chosen:
        raise ConfigError(
            "--precision float8 requires linear layers whose sizes are multiples of "
            f"{MULTIPLE}, and this model has none: use bf16"
        )
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=device.type == "cpu"),
        module_filter_fn=lambda _, name: name in chosen,
    )


def _linear(model: nn.Module, layers: Sequence[str]) -> Iterator[str]:
    """The names of the linear layers in `layers` that have products in float8."""
    for layer in layers:
        for name, module in model.get_submodule(layer).named_modules(prefix=layer):
            if type(module) is nn.Linear and not any(n % MULTIPLE for n in module.weight.shape):
                yield name
