"""Uninterrupted runs, to which others are compared; made once."""

import pytest
from ranks import FOUR_EPOCHS, train_alone, train_ranks


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory):
    """The folder of an uninterrupted run of one process: 4 epochs of 17 steps, each step logged."""
    folder = tmp_path_factory.mktemp("one-rank")
    train_alone(folder, *FOUR_EPOCHS)
    return folder


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """The same on two ranks."""
    folder = tmp_path_factory.mktemp("two-ranks")
    train_ranks(folder, 2, *FOUR_EPOCHS)
    return folder
