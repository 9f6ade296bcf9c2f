"""A small convolutional network: 38 thousand parameters, 8 x 8 pixels in, ten classes out.

No batch normalisation and no dropout: both would make the numbers depend on how a batch is split.
"""

from __future__ import annotations

from torch import nn


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
