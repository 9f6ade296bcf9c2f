"""Where samples come from: tensors in memory, a dataset with an index, or a stream.

Each is what torch's `DataLoader` reads in its workers: one item is one rank's shard of a global
batch, collated, and how many samples of it count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainer.seeds import seed_batch, seed_read
from trainer.task import IGNORE_INDEX

Collate = Callable[[list[Any]], Any]


class Samples(NamedTuple):
    """A rank's shard of a batch. `real` samples of it count, and `of_all` on all ranks.

    A shard without samples holds one that does not count: every rank takes part in every step.
    """

    batch: Any
    real: int
    of_all: int


class InMemory(Dataset[tuple[Tensor, Tensor]]):
    """Two tensors, by tensors of indices; index `IGNORE_INDEX` gives a sample that does not count.

    One indexing operation makes a batch, which is much faster than to collate samples.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self._inputs, self._targets = dataset.tensors

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if indices[-1] != IGNORE_INDEX:
            return self._inputs[indices], self._targets[indices]
        existing = indices.clamp(min=0)
        targets = self._targets[existing]
        targets[indices == IGNORE_INDEX] = IGNORE_INDEX
        return self._inputs[existing], targets


@dataclass(frozen=True, eq=False)
class Indexed(Dataset[Samples]):
    """Any dataset with an index, by the indices of a global batch, a tensor.

    A shard is filled with repetitions of one sample up to `least` samples. An item is the number of
    a batch and its indices. What is drawn for it follows from `seeds`, its number and the shard.
    """

    dataset: Any
    collate: Collate
    shard: slice
    least: int
    seeds: tuple[int, int]

    def __getitem__(self, numbered: tuple[int, Tensor]) -> Samples:
        number, row = numbered
        seed_batch(*self.seeds, number, self.shard.start)
        indices: list[int] = row.tolist()
        mine = indices[self.shard]
        samples = [self.dataset[index] for index in filled(mine, indices, self.least)]
        return Samples(self.collate(samples), len(mine), len(indices))


@dataclass(frozen=True, eq=False)
class Stream(IterableDataset[Samples]):
    """An iterable dataset, from its global batch number `first` on.

    One process reads it: several would each read all of it, or parts of it where the stream divides
    itself by `get_worker_info`. `passes` is how often the dataset is read, each time after a
    call of its `set_epoch`, if it has one. `least` is that of `Indexed`. What the stream draws
    follows from `seed` and the number of the batch, what is drawn to collate it from the shard too.
    """

    dataset: Iterable[Any]
    collate: Collate
    batch_size: int
    shard: slice
    least: int
    seed: int
    first: int
    passes: Iterable[int]

    def __iter__(self) -> Iterator[Samples]:
        batches = enumerate(self._global_batches())
        for number, samples in islice(batches, self.first, None):
            seed_batch(self.seed, 0, number, self.shard.start)
            mine = samples[self.shard]
            batch = self.collate(filled(mine, samples, self.least))
            yield Samples(batch, len(mine), len(samples))

    def _global_batches(self) -> Iterator[list[Any]]:
        numbers = count()
        for number in self.passes:
            seed_read(self.seed, next(numbers))
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(number)
            samples = iter(self.dataset)
            while batch := list(islice(samples, self.batch_size)):
                yield batch
                seed_read(self.seed, next(numbers))


def filled(mine: list[Any], others: list[Any], least: int) -> list[Any]:
    """Those of `mine`, and repetitions of one of them or of `others` up to the number `least`."""
    return mine + (mine or others)[:1] * (least - len(mine))


def loader(source: Any, order: list[Any] | None, workers: int, *, gpu: bool) -> Iterable[Any]:
    """The items of `source`, in `order` if it has an index, read ahead by `workers` processes."""
    if not (workers or gpu):
        return map(source.__getitem__, order) if order is not None else source
    return DataLoader(source, batch_size=None, sampler=order, num_workers=workers, pin_memory=gpu)
