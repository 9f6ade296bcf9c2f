"""An exponential moving average of the weights, for evaluation and export.

https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.parallel.shards import local

PREFIX = "average."
"""Of the names of averaged weights in a checkpoint."""


class WeightAverage:
    """The average of each trainable parameter on this rank, of what it holds of it."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = {
            name: each for name, each in model.named_parameters() if each.requires_grad
        }
        self._averages = {name: each.detach().clone() for name, each in self._parameters.items()}
        self._decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights, after a step."""
        torch._foreach_lerp_(*self._pairs(), 1 - self._decay)

    def state(self) -> dict[str, Tensor]:
        """The averages, by names for a checkpoint."""
        return {f"{PREFIX}{name}": value for name, value in self._averages.items()}

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Compute with the averages in the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(*self._pairs(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        weights = [local(each.data) for each in self._parameters.values()]
        return [local(each) for each in self._averages.values()], weights
