"""Try a model with one batch, and leave it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the model's buffers and the state of the random numbers after the block."""
    before = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


def has_unused_parameters(
    model: nn.Module, device: torch.device, loss: Callable[[], Tensor]
) -> bool:
    """Whether a trainable parameter of `model` gets no gradient from `loss`."""
    with unchanged(model, device):
        torch.autograd.backward(loss())
    unused = any(each.requires_grad and each.grad is None for each in model.parameters())
    model.zero_grad()
    return unused
