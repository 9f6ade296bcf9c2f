"""Fixtures: uninterrupted runs to compare with, and a process group; each made once."""

import pytest

from tests.trainer.rank_pool import RankPool
from tests.trainer.ranks import FOUR_EPOCHS, train_alone, train_ranks
from trainer.parallel import process_group


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory):
    """The folder of an uninterrupted run of one process: 4 epochs of 17 steps, all logged."""
    folder = tmp_path_factory.mktemp("one-rank")
    train_alone(folder, *FOUR_EPOCHS)
    return folder


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """The same on two ranks."""
    folder = tmp_path_factory.mktemp("two-ranks")
    train_ranks(folder, 2, *FOUR_EPOCHS)
    return folder


@pytest.fixture(scope="module")
def four(pools):
    """Four ranks that train on request."""
    return pools[4]


@pytest.fixture(scope="module")
def context():
    """A process group of one: this process."""
    yield process_group.join()
    process_group.leave()


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """Pools of ranks, by their number."""
    started = {n: RankPool(n, tmp_path_factory.mktemp(f"{n}-ranks")) for n in (1, 2, 4)}
    yield started
    for pool in started.values():
        pool.close()
