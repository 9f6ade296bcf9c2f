"""The model and its data: replace both with your own. train.py does the rest.

deploykit submit --wait                                 # with DistributedDataParallel
deploykit submit --wait -- --strategy fsdp --epochs 9   # sharded; `python train.py --help`
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainer.task import Task


def points(count: int) -> TensorDataset:
    """Return points of a square, labeled by whether they are inside a circle. Use your own data."""
    corners = torch.rand(count, 2) * 2 - 1
    return TensorDataset(corners, (corners.norm(dim=1) < 0.8).long())


def network() -> nn.Module:
    """Return the model, which maps two numbers to the scores of two classes."""
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))


def task(options: object) -> Task:
    """Return the task. Every rank calls this function; `options` are the command-line options."""
    torch.manual_seed(0)  # the same points on every rank
    return Task(network, training=points(4096), validation=points(512))
