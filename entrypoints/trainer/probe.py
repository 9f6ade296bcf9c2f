"""Try a model with one batch, and leave it as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.checkpoint.stored_state import with_extra_state


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode in the block; then each module is in its own mode again.

    `train()` would also thaw the modules that are meant to stay in evaluation mode.
    """
    modules = [module for model in models for module in model.modules()]
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the model's buffers, extra state and the random numbers after the block."""
    before = [buffer.clone() for buffer in model.buffers()]
    extra = [
        (module, copy.deepcopy(module.get_extra_state())) for _, module in with_extra_state(model)
    ]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    for module, state in extra:
        module.set_extra_state(state)


def has_unused_parameters(
    model: nn.Module, device: torch.device, loss: Callable[[], Tensor]
) -> bool:
    """Whether a trainable parameter of `model` gets no gradient from `loss`."""
    with unchanged(model, device):
        torch.autograd.backward(loss())
    unused = any(each.requires_grad and each.grad is None for each in model.parameters())
    model.zero_grad()
    return unused
