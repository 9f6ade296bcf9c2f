"""A recommender: how likely a user with a given history wants an item, from generated clicks.

    train.py --task recommender:task --task-option items=100000000 --strategy fsdp-tp ...

Nearly all parameters are in the item table. Its tensor-parallel plan divides the rows over the
ranks. Each rank looks up its own rows, and only the rows that were found are sent. (Data
parallelism alone would gather the whole table on every rank, sharded or not.) The table consists of
shelves, because weights are initialized one module at a time: a rank never holds more than one
shelf and its own rows.
"""

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import Dataset
from trainer.task import Task, reset_parameters

HISTORY, WIDTH, SHELVES = 8, 32, 8


class Table(nn.Module):
    """Embeddings of `items`, in shelves of consecutive rows."""

    def __init__(self, items):
        super().__init__()
        self.rows = -(-items // SHELVES)
        self.shelves = nn.ModuleList(nn.Embedding(self.rows, WIDTH) for _ in range(SHELVES))

    def forward(self, items):
        """Items (samples, HISTORY + 1) to vectors, one after the other (samples, ...)."""
        shelf, row = items // self.rows, items % self.rows
        found = (part(row) * (shelf == n)[..., None] for n, part in enumerate(self.shelves))
        return sum(found).flatten(1)


def build(items):
    return nn.Sequential(
        Table(items),
        nn.Linear((HISTORY + 1) * WIDTH, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
        nn.Flatten(0),
    )


def tensor_parallel(_model):
    return {
        "0.shelves.*": RowwiseParallel(input_layouts=Replicate()),
        "1": ColwiseParallel(),
        "3": RowwiseParallel(),
    }


class Clicks(Dataset):
    """Users want items of their own kind: those with the same remainder."""

    def __init__(self, items, first, samples):
        self.items, self.first, self.samples = items, first, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        chance = torch.Generator().manual_seed(self.first + number)
        kind, item, wanted = torch.randint(self.items, (3,), generator=chance).tolist()
        history = torch.randint(self.items // 4, (HISTORY,), generator=chance) * 4 + kind % 4
        item = item // 4 * 4 + (kind + wanted % 2) % 4
        return torch.cat([history, torch.tensor([item])]), torch.tensor(1.0 - wanted % 2)


def loss(scores, wanted):
    return binary_cross_entropy_with_logits(scores, wanted, reduction="none")


def right(scores, wanted):
    return ((scores > 0) == (wanted > 0)).sum()


def task(options):
    items = int(options.task_options.get("items", 4096)) // 4 * 4

    def model():
        return build(items)

    return Task(
        model,
        training=Clicks(items, 0, 4096),
        validation=Clicks(items, 4096, 512),
        loss=loss,
        metrics={"accuracy": right},
        tensor_parallel=tensor_parallel,
        init=reset_parameters,
    )
