"""scikit-learn's handwritten digits: 1797 real images of 8 x 8 pixels, shipped in the package."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

from trainer.group import Place

TRAINING, VALIDATION, TEST = 1077, 360, 360
MEAN, DEVIATION = 4.9, 6.0
"""Of the pixels, which run from 0 to 16. Raw pixels train to the same accuracy, but on a path so
unstable that rounding, which depends on the number of ranks, shows in the loss after 50 steps."""


def splits() -> list[Subset]:
    """Training, validation and test images; the split never changes, whatever the seed of a run."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    dataset = TensorDataset((images - MEAN) / DEVIATION, torch.tensor(digits.target))
    return random_split(dataset, [TRAINING, VALIDATION, TEST], torch.Generator().manual_seed(0))


def training_loader(dataset: Subset, batch_size: int, seed: int, place: Place) -> DataLoader:
    """One rank's share of each global batch.

    The sampler deals one shuffled order out to the ranks in turn, so step n sees the same images
    however many ranks there are. A last batch that is not full is left out: every epoch has
    another one, and a padded one would count some images twice.
    """
    sampler = DistributedSampler(
        dataset, num_replicas=place.world, rank=place.rank, seed=seed, drop_last=True
    )
    return DataLoader(dataset, batch_size // place.world, sampler=sampler, drop_last=True)


def evaluation_loader(dataset: Subset, place: Place) -> DataLoader:
    """One rank's share of `dataset`: each image on exactly one rank; shares may differ in size."""
    return DataLoader(Subset(dataset, range(place.rank, len(dataset), place.world)), batch_size=64)
