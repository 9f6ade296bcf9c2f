"""Random numbers of torch, numpy and Python, which follow from a few whole numbers alone.

Models, datasets and collate functions draw from any of the three. Ranks that share samples must
draw the same: otherwise one masks what another one predicts.
"""

from __future__ import annotations

import random
import sys

import torch

SEED_STEP = 1_000_003
"""A prime: with it, a seed and a number give different sums for all small seeds and numbers."""


def mixed(*numbers: int) -> int:
    """One seed from several numbers. torch's generator on the CPU takes 32 bits of it, so each
    number is spread over them.
    """
    seed = 0
    for number in numbers:
        seed = seed * SEED_STEP + number
    return seed % 2**64


def seed_torch(seed: int) -> None:
    """Seed torch's generators of the CPU and, if it is in use, of the GPU.

    `torch.manual_seed` does the same, and for each kind of device that is absent it formats the
    stack (torch 2.13).
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def seed_python(seed: int) -> None:
    """Seed Python's generator, and that of numpy where it has been imported."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def seed_all(seed: int) -> None:
    """Seed all three."""
    seed_torch(seed)
    seed_python(seed)


def seed_batch(seed: int, epoch: int, number: int, shard: int) -> None:
    """Seed what a data shard draws for its part of a batch, in any process that makes it."""
    seed_all(mixed(1, seed, epoch, number, shard))


def seed_read(seed: int, number: int) -> None:
    """Seed what a stream draws while a global batch is read, on all ranks alike."""
    seed_all(mixed(2, seed, number))
