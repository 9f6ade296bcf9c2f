"""What the examples train: scikit-learn's digits, split as in the main trainer, and a network.

They deal out the same batches in the same order from the same first weights, so what differs
between them is only when a gradient is applied.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

TRAINING, VALIDATION = 1077, 360
MEAN, DEVIATION = 4.9, 6.0
WIDTH, CLASSES = 64, 10
BLOCKS = 4


def images(part: str) -> tuple[Tensor, Tensor]:
    """Pixels [images, 64] and labels [images] of the part `training` or `test`."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    chosen = order[:TRAINING] if part == "training" else order[TRAINING + VALIDATION :]
    pixels = torch.tensor(digits.data, dtype=torch.float32)[chosen]
    return (pixels - MEAN) / DEVIATION, torch.tensor(digits.target)[chosen]


def steps(options: argparse.Namespace, together: int) -> int:
    """How many batches a run has. It is cut to a multiple of `together`, the size of a group that
    is applied as one in the synchronous mode.
    """
    count = options.epochs * (TRAINING // options.batch_size)
    return count - count % together


def batch(options: argparse.Namespace, step: int) -> Tensor:
    """The training images of a step, as indices [batch]; each epoch has an order of its own."""
    epoch, place = divmod(step, TRAINING // options.batch_size)
    order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(options.seed + epoch))
    return order[place * options.batch_size :][: options.batch_size]


def network(options: argparse.Namespace) -> nn.Sequential:
    """Four blocks, 64 values between any two, so that a pipeline can be cut between them."""
    torch.manual_seed(options.seed)
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS - 1)]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def accuracy(outputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """The share that is right, and the mean loss. `outputs` is [images, 10]."""
    right = (outputs.argmax(dim=1) == labels).double().mean().item()
    return right, cross_entropy(outputs, labels).item()


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all three have."""
    found = argparse.ArgumentParser(description=description.splitlines()[0])
    found.add_argument("--epochs", type=int, default=20)
    found.add_argument("--batch-size", type=int, default=32, help="images behind one gradient")
    found.add_argument("--lr", type=float, default=0.1, help="learning rate of one gradient")
    found.add_argument("--seed", type=int, default=0, help="for the weights and the order")
    found.add_argument("--synchronous", action="store_true", help="the baseline: nothing is stale")
    return found
