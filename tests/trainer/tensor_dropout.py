"""A task with dropout between sharded layers and outside, which prints what each forward keeps."""

import sys
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional
from torch.utils.data import TensorDataset

from trainer.task import Task


class Dropout(nn.Dropout):
    """Prints the mask of the first sample; of ones, so that no activation looks dropped."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, inputs):
        if inputs.is_meta or not self.training:
            return inputs
        mask = self.mask(torch.ones_like(inputs))
        kept = "".join("01"[value > 0] for value in mask[0].tolist())
        sys.stdout.write(f"{self.place} {kept}\n")
        return inputs * mask

    def mask(self, ones):
        return super().forward(ones)


class Thinned(Dropout):
    """The same by a function, with names that do not say so."""

    def __init__(self, place):
        nn.Module.__init__(self)
        self.place, self.rate = place, 0.5

    def mask(self, ones):
        return functional.dropout(ones, self.rate)


class Block(nn.Module):
    """16 features, and 64 within, which are divided over the ranks."""

    def __init__(self, kind):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.within = kind("within")
        self.down = nn.Linear(64, 16)
        self.outside = kind("outside")

    def forward(self, values):
        return values + self.outside(self.down(self.within(torch.tanh(self.up(values)))))


class Blocks(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, values):
        for block in self.blocks:
            values = block(values)
        return self.head(values)


def task(options):
    kind = Thinned if "function" in options.task_options else Dropout
    numbers = torch.Generator().manual_seed(0)
    values = torch.randn(64, 16, generator=numbers)
    return Task(
        partial(Blocks, kind),
        TensorDataset(values, values[:, :4].argmax(dim=1)),
        layers=lambda model: list(model.blocks),
        tensor_parallel=lambda _: {
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
