"""Fixtures: uninterrupted runs to compare with, and process groups; each made once."""

import pytest
import torch

from tests.trainer.rank_pool import RankPool
from tests.trainer.ranks import FOUR_EPOCHS, train_alone
from trainer.parallel import process_group


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """As many as the ranks of the other tests have: several would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory):
    """The folder of an uninterrupted run of one process: 4 epochs of 17 steps, all logged."""
    folder = tmp_path_factory.mktemp("one-rank")
    train_alone(folder, *FOUR_EPOCHS)
    return folder


@pytest.fixture(scope="session")
def two_ranks(once):
    """The same on two ranks."""
    return once(2, *FOUR_EPOCHS)


@pytest.fixture(scope="session")
def pools(tmp_path_factory):
    """Pools of ranks, by their number. They start when they are first used."""
    started = {n: RankPool(n, tmp_path_factory.mktemp(f"{n}-ranks")) for n in (1, 2, 3, 4)}
    yield started
    for pool in started.values():
        pool.close()


@pytest.fixture(scope="session")
def four(pools):
    """Four ranks that train on request."""
    return pools[4]


@pytest.fixture(scope="session")
def once(pools, tmp_path_factory):
    """The folder of a run on so many ranks, which is trained when it is first asked for."""
    folders = {}

    def folder(world, *arguments, double=False):
        key = (world, arguments, double)
        if key not in folders:
            made = tmp_path_factory.mktemp("run")
            pools[world].train(made, *arguments, double=double)
            folders[key] = made
        return folders[key]

    return folder


@pytest.fixture(scope="module")
def context():
    """A process group of one: this process."""
    yield process_group.join()
    process_group.leave()
