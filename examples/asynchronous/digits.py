"""Data and network for the examples: scikit-learn's digits, split as in the reference trainer.

All examples use the same batches in the same order and the same initial weights. They differ only
in when a gradient is applied.
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
    """Pixels (images, 64) and labels (images,) of the part `training` or `test`."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    chosen = order[:TRAINING] if part == "training" else order[TRAINING + VALIDATION :]
    pixels = torch.tensor(digits.data, dtype=torch.float32)[chosen]
    return (pixels - MEAN) / DEVIATION, torch.tensor(digits.target)[chosen]


def steps(options: argparse.Namespace, together: int) -> int:
    """The number of batches of a run, rounded down to a multiple of `together`, the number of
    gradients that the synchronous mode applies as one update.
    """
    count = options.epochs * (TRAINING // options.batch_size)
    return count - count % together


def batch(options: argparse.Namespace, step: int) -> Tensor:
    """Indices (batch,) of the training images of a step; each epoch is shuffled anew."""
    epoch, index = divmod(step, TRAINING // options.batch_size)
    order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(options.seed + epoch))
    return order[index * options.batch_size :][: options.batch_size]


def network(options: argparse.Namespace) -> nn.Sequential:
    """Four blocks with 64 activations between them, so that a pipeline can be split anywhere."""
    torch.manual_seed(options.seed)
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS - 1)]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def accuracy(outputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy and mean loss of outputs (images, 10)."""
    right = (outputs.argmax(dim=1) == labels).double().mean().item()
    return right, cross_entropy(outputs, labels).item()


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of all examples."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images per gradient")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate per gradient")
    parser.add_argument("--seed", type=int, default=0, help="seed for weights and sample order")
    parser.add_argument("--synchronous", action="store_true", help="run the synchronous baseline")
    return parser
