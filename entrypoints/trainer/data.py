"""The samples of each step, independent of the number of ranks and of restarts.

`InMemory`, `Indexed` and `Stream` are what torch's `DataLoader` reads in its workers: one item is
one rank's shard of a global batch, collated, and how many samples of it count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from trainer.errors import ConfigError
from trainer.parallel.process_group import DistributedContext
from trainer.seeds import mixed, seed_batch, seed_read
from trainer.task import IGNORE_INDEX, Task, inputs_and_targets, is_integer, samples_in

_POOL = 50
"""Batches whose samples are sorted by length together: more pad less, and are less random."""

Collate = Callable[[list[Any]], Any]


class Batch(NamedTuple):
    """One rank's shard of a global batch.

    `inputs` and `targets` are what the task makes of a batch; their tensors are (samples, ...).
    `count` is the number of targets that count on this rank, `total` that of all, or 1 for none.
    """

    inputs: Any
    targets: Any
    count: int | Tensor  # type: ignore[assignment]  # a tuple's `count` is not used
    total: int | Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), tuple(self)))


@dataclass(frozen=True)
class DataShard:
    """A rank's part of each global batch: samples `index`, `index + num_shards`, and so on.

    The ranks of `group` have the other shards; None is all ranks. With `equal_sizes`, all batches
    have the same number of samples.
    """

    index: int
    num_shards: int
    group: ProcessGroup | None = None
    equal_sizes: bool = False


def split(batch: Batch, parts: int, task: Task) -> list[Batch]:
    """Micro-batches of about equal size, as many on every rank.

    Where there are fewer samples than parts, the first sample fills the others, uncounted.
    """
    if parts == 1:
        return [batch]
    size = samples_in(batch.inputs)
    bounds = [size * part // parts for part in range(parts + 1)]
    return [_part(batch, begin, end, task) for begin, end in pairwise(bounds)]


def piece(tree: Any, number: int, parts: int) -> Any:
    """Part `number` of a structure of tensors, whose first sizes are multiples of `parts`."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.chunk(parts)[number], tree)


def _part(batch: Batch, begin: int, end: int, task: Task) -> Batch:
    rows = slice(begin, end) if end > begin else slice(1)
    inputs, targets = pytree.tree_map(
        lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf,
        (batch.inputs, batch.targets),
    )
    count = task.targets_in(targets) * (batch.count > 0) if end > begin else 0
    return Batch(inputs, targets, count, batch.total)


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


class BatchLoader:
    """Batches of a dataset, in an order that depends on seed and epoch only.

    Each epoch visits every sample once; a stream is read again and again instead. A short last
    batch is filled up with samples whose targets are `IGNORE_INDEX`, if the data is in memory or
    all batches must be of equal size. Otherwise ranks may have different numbers of samples.
    """

    def __init__(
        self,
        task: Task,
        dataset: Dataset[Any],
        batch_size: int,
        shard: DataShard,
        context: DistributedContext,
    ) -> None:
        self._task = task
        self._dataset: Any = dataset
        self._batch_size = batch_size
        self._shard = shard
        self._device = context.device
        self._counts = _counts(task, dataset)

    def __len__(self) -> int:
        return math.ceil(len(self._dataset) / self._batch_size)

    def epoch(self, number: int, seed: int, first: int = 0, workers: int = 0) -> Iterator[Batch]:
        """The shuffled batches of epoch `number`, starting with batch `first`."""
        if isinstance(self._dataset, IterableDataset):
            return self._streamed(seed, first, workers, passes=count())
        generator = torch.Generator().manual_seed(mixed(seed, number))
        order = torch.randperm(len(self._dataset), generator=generator)
        if self._task.lengths is not None:
            lengths = torch.as_tensor(self._task.lengths)
            order = by_length(order, lengths, self._batch_size, generator)
        return self._batches(order, (seed, number), first, workers)

    def in_order(self, seed: int = 0) -> Iterator[Batch]:
        """All batches, unshuffled."""
        if isinstance(self._dataset, IterableDataset):
            return self._streamed(seed, 0, 0, passes=range(1))
        return self._batches(torch.arange(len(self._dataset)), (seed, -1), 0, 0)

    def _batches(
        self, order: Tensor, seeds: tuple[int, int], first: int, workers: int
    ) -> Iterator[Batch]:
        if self._counts is not None:
            return self._in_memory(order, self._counts, first, workers)
        rows = list(enumerate(order.split(self._batch_size)))[first:]
        collate = self._task.collate or default_collate
        source = Indexed(self._dataset, collate, self._slice, self._least, seeds)
        return self._counted(loader(source, rows, workers, gpu=self._gpu))

    def _in_memory(
        self, order: Tensor, counts: Tensor, first: int, workers: int
    ) -> Iterator[Batch]:
        padded = torch.full((len(self) * self._batch_size,), IGNORE_INDEX)
        padded[: len(order)] = order
        rows = padded.view(-1, self._batch_size)[first:]
        indices = rows[:, self._slice]
        loaded = loader(InMemory(self._dataset), list(indices), workers, gpu=self._gpu)
        sums = zip(_sums(counts, indices), _sums(counts, rows), strict=True)
        for tensors, (own, total) in zip(loaded, sums, strict=True):
            inputs, targets = map(self._moved, tensors)
            yield Batch(inputs, targets, own, max(total, 1))

    def _streamed(
        self, seed: int, first: int, workers: int, passes: Iterable[int]
    ) -> Iterator[Batch]:
        collate = self._task.collate or default_collate
        read = (self._batch_size, self._slice, self._least, seed, first, passes)
        source = Stream(self._dataset, collate, *read)
        return self._counted(loader(source, None, min(workers, 1), gpu=self._gpu))

    def _counted(self, loaded: Iterable[Samples]) -> Iterator[Batch]:
        """The batches on the device, with the numbers of their targets. Collective."""
        for samples in loaded:
            pair = self._task.split(samples.batch)
            inputs, targets = pytree.tree_map_only(Tensor, self._moved, pair)
            if self._shard.equal_sizes and samples.of_all < self._batch_size:
                _ignore(targets, samples.real)
            if self._task.count is None and not is_integer(targets):
                yield Batch(inputs, targets, samples.real, samples.of_all)
                continue
            own = torch.as_tensor(self._task.targets_in(targets), device=self._device)
            own = own if samples.real else torch.zeros_like(own)
            total = own.clone()  # or a sum of weights
            if self._shard.num_shards > 1:
                distributed.all_reduce(total, group=self._shard.group)
            yield Batch(inputs, targets, own, torch.where(total > 0, total, 1))

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=self._gpu)

    @property
    def _gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _least(self) -> int:
        """The least number of samples in a batch of this rank."""
        return self._batch_size // self._shard.num_shards if self._shard.equal_sizes else 1

    @property
    def _slice(self) -> slice:
        return slice(self._shard.index, None, self._shard.num_shards)


def by_length(order: Tensor, lengths: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """The indices of `order` (samples,) in another one, whose batches have similar `lengths`.

    The batches are in random order, but for a last one of fewer than `size` samples.
    """
    pools = order.split(_POOL * size)
    near = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
    whole = len(near) // size
    rows = near[: whole * size].view(whole, size)
    return torch.cat(
        [rows[torch.randperm(whole, generator=generator)].flatten(), near[whole * size :]]
    )


def _counts(task: Task, dataset: Any) -> Tensor | None:
    """The targets of each sample, if the data is in memory and each sample a row of integers.

    A subclass of `TensorDataset` is not: what it does to a sample is only known to it.
    """
    custom = task.collate or task.count or task.split is not inputs_and_targets
    if custom or type(dataset) is not TensorDataset or len(dataset.tensors) != 2:  # noqa: PLR2004
        return None
    targets = dataset.tensors[1]
    if not is_integer(targets):
        return None
    return (targets != IGNORE_INDEX).view(len(dataset), -1).sum(dim=1)


def _sums(counts: Tensor, rows: Tensor) -> list[int]:
    """The targets in each row of indices."""
    sums: list[int] = counts[rows.clamp(min=0)].masked_fill(rows == IGNORE_INDEX, 0).sum(1).tolist()
    return sums


def check_equal_sizes(task: Task, targets: Any, size: int) -> None:
    """Raise ConfigError if a pipeline cannot fill up the last batch of a dataset of `task`.

    `targets` are those of a batch, and `size` is the number of samples in a global one.
    """
    if is_integer(targets):
        return
    datasets: dict[str, Any] = {"training": task.training, "validation": task.validation}
    for name, dataset in (datasets | {"test": task.test}).items():
        short = dataset is not None and hasattr(dataset, "__len__") and len(dataset) % size
        if short:
            raise ConfigError(
                f"a pipeline requires batches of equal size, but the last batch of the {name} data "
                f"has {short} samples, and only integer targets can be padded: drop those samples, "
                f"or choose a --batch-size that divides {len(dataset)}, or another strategy"
            )


def _ignore(targets: Any, first: int) -> None:
    """Do not count the targets from number `first` on. Raises ConfigError if that is impossible."""
    if not is_integer(targets):
        raise ConfigError(
            "a pipeline requires batches of equal size, and only integer targets can pad the last "
            "batch of a stream: choose another strategy"
        )
    targets[first:] = IGNORE_INDEX
