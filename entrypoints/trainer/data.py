"""Which samples each step sees, on any number of ranks, from any step on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from trainer.group import Place

IGNORED = -100
"""Target of a sample that fills up a short batch: `cross_entropy` leaves it out of its sum."""


class Batch(NamedTuple):
    """One rank's share of a global batch.

    `inputs` and `targets` begin with the dimension of samples, always of the same size;
    `count` is the number of targets in the whole global batch that are not `IGNORED`.
    """

    inputs: Tensor
    targets: Tensor
    count: int


@dataclass(frozen=True)
class Share:
    """A rank's part of every global batch: samples `index`, `index + of`, `index + 2 * of` ..."""

    index: int
    of: int


class Batches:
    """The batches of a dataset in an order that follows from seed and epoch alone.

    Every sample is seen once an epoch. The last batch may be short: it is filled up with samples
    whose targets are `IGNORED`, so that all shapes stay the same and all ranks stay busy.
    """

    def __init__(self, dataset: TensorDataset, size: int, share: Share, place: Place) -> None:
        self._dataset = dataset
        self._size = size
        self._share = share
        self._device = place.device

    def __len__(self) -> int:
        return math.ceil(len(self._dataset) / self._size)

    def epoch(self, number: int, seed: int, first: int = 0, workers: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number`, shuffled, from batch `first` on."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        order = torch.randperm(len(self._dataset), generator=generator)
        return self._batches(order, first, workers)

    def in_order(self) -> Iterator[Batch]:
        """All of them, unshuffled."""
        return self._batches(torch.arange(len(self._dataset)), 0, 0)

    def _batches(self, order: Tensor, first: int, workers: int) -> Iterator[Batch]:
        """Tensors are sliced by whole batches; `workers` processes prepare them ahead."""
        whole = torch.full((len(self) * self._size,), IGNORED)
        whole[: len(order)] = order
        shares = whole.view(-1, self._size)[first:, self._share.index :: self._share.of]
        for number, (inputs, targets) in enumerate(self._loaded(shares, workers), first):
            samples = min(self._size, len(order) - number * self._size)
            move = {"device": self._device, "non_blocking": self._device.type == "cuda"}
            count = samples * targets[0].numel()
            yield Batch(inputs.to(**move), targets.to(**move), count)

    def _loaded(self, shares: Tensor, workers: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Inputs and targets of each row of positions; all is in memory, so a row is one slice."""
        filled, gpu = _Filled(self._dataset), self._device.type == "cuda"
        if not (workers or gpu):
            return map(filled.__getitem__, shares)
        rows = {"batch_size": None, "sampler": list(shares)}
        return DataLoader(filled, **rows, num_workers=workers, pin_memory=gpu)


class _Filled:
    """A dataset that answers the position `IGNORED` with a sample that nothing is learned from."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._inputs, self._targets = dataset.tensors

    def __getitem__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if positions[-1] != IGNORED:
            return self._inputs[positions], self._targets[positions]
        places = positions.clamp(min=0)
        targets = self._targets[places]
        targets[positions == IGNORED] = IGNORED
        return self._inputs[places], targets
