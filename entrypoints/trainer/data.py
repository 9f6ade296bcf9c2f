"""The samples of each step, independent of the number of ranks and of restarts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainer.process_group import DistributedContext

IGNORE_INDEX = -100
"""Target of padding samples; the default `ignore_index` of `cross_entropy`."""


class Batch(NamedTuple):
    """One rank's shard of a global batch.

    `inputs` is (samples, ...) and `targets` is (samples,) or (samples, sequence). The number of
    samples is the same for every batch. `target_count` is the number of targets in the whole
    global batch that are not `IGNORE_INDEX`, at least 1.
    """

    inputs: Tensor
    targets: Tensor
    target_count: int


@dataclass(frozen=True)
class DataShard:
    """A rank's part of each global batch: samples `index`, `index + num_shards`, and so on."""

    index: int
    num_shards: int


class BatchLoader:
    """Batches of a dataset, in an order that depends on seed and epoch only.

    Each epoch visits every sample once. A short last batch is padded with samples whose targets
    are `IGNORE_INDEX`, so that all batches have the same shape on all ranks.
    """

    def __init__(
        self,
        dataset: TensorDataset,
        batch_size: int,
        shard: DataShard,
        context: DistributedContext,
    ) -> None:
        self._dataset = dataset
        self._counts = (dataset.tensors[1] != IGNORE_INDEX).view(len(dataset), -1).sum(dim=1)
        """Targets of each sample."""
        self._batch_size = batch_size
        self._shard = shard
        self._device = context.device

    def __len__(self) -> int:
        return math.ceil(len(self._dataset) / self._batch_size)

    def epoch(self, number: int, seed: int, first: int = 0, workers: int = 0) -> Iterator[Batch]:
        """The shuffled batches of epoch `number`, starting with batch `first`."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        order = torch.randperm(len(self._dataset), generator=generator)
        return self._batches(order, first, workers)

    def in_order(self) -> Iterator[Batch]:
        """All batches, unshuffled."""
        return self._batches(torch.arange(len(self._dataset)), 0, 0)

    def _batches(self, order: Tensor, first: int, workers: int) -> Iterator[Batch]:
        padded = torch.full((len(self) * self._batch_size,), IGNORE_INDEX)
        padded[: len(order)] = order
        rows = padded.view(-1, self._batch_size)[first:]
        indices = rows[:, self._shard.index :: self._shard.num_shards]
        asynchronous = self._device.type == "cuda"
        loaded = self._loaded(indices, workers)
        for (inputs, targets), count in zip(loaded, self._target_counts(rows), strict=True):
            yield Batch(
                inputs.to(self._device, non_blocking=asynchronous),
                targets.to(self._device, non_blocking=asynchronous),
                count,
            )

    def _target_counts(self, rows: Tensor) -> list[int]:
        """Targets in each global batch, a row of indices; 1 where there are none to divide by."""
        counts = self._counts[rows.clamp(min=0)].masked_fill(rows == IGNORE_INDEX, 0).sum(dim=1)
        return counts.clamp(min=1).tolist()

    def _loaded(self, indices: Tensor, workers: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Inputs and targets for each row of `indices` (batches, samples).

        The data is in memory, so one row is one indexing operation.
        """
        dataset, gpu = _PaddedDataset(self._dataset), self._device.type == "cuda"
        if not (workers or gpu):
            return map(dataset.__getitem__, indices)
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=list(indices),
            num_workers=workers,
            pin_memory=gpu,
        )


class _PaddedDataset(Dataset[tuple[Tensor, Tensor]]):
    """Samples by tensors of indices; index `IGNORE_INDEX` gives a padding sample."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._inputs, self._targets = dataset.tensors

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if indices[-1] != IGNORE_INDEX:
            return self._inputs[indices], self._targets[indices]
        existing = indices.clamp(min=0)
        targets = self._targets[existing]
        targets[indices == IGNORE_INDEX] = IGNORE_INDEX
        return self._inputs[existing], targets
