"""Results do not depend on the number of processes or nodes."""

import pytest

from tests.trainer.ranks import (
    FOUR_EPOCHS,
    TRAIN,
    free_port,
    lines,
    losses,
    outputs,
    start,
    weights,
)

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

ROUNDING = 1e-6
"""Of the loss over the first 50 steps; measured: 4e-7. Single precision, summed in another order;
the difference grows with each step, to 1.3e-6 after 66."""
WEIGHTS = 1e-3
"""Of any weight after all 68 steps; measured: 2e-5 on one processor, 3e-4 on another."""


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """The folder of a run on two nodes of two ranks, with a torchrun each."""
    folder, port = tmp_path_factory.mktemp("four-ranks"), free_port()
    nodes = [
        start(
            [
                *("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"),
                *("--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"),
                *(TRAIN, *FOUR_EPOCHS),
            ],
            folder,
        )
        for node in range(2)
    ]
    outputs(nodes)
    return folder


def first(folder):
    """The losses of the first 50 steps."""
    return dict(list(losses(folder).items())[:50])


def test_every_step_is_logged_and_the_loss_falls(one_rank):
    values = losses(one_rank)

    assert list(values) == list(range(1, 69))
    assert values[1] > 2
    assert values[68] < 0.5


def test_two_ranks_agree_with_one(one_rank, two_ranks):
    assert first(two_ranks) == pytest.approx(first(one_rank), rel=0, abs=ROUNDING)
    assert (weights(two_ranks) - weights(one_rank)).abs().max() < WEIGHTS


def test_four_ranks_agree_with_one(one_rank, four_ranks):
    assert first(four_ranks) == pytest.approx(first(one_rank), rel=0, abs=ROUNDING)
    assert (weights(four_ranks) - weights(one_rank)).abs().max() < WEIGHTS


def test_accuracies_are_the_same_for_any_number_of_ranks(one_rank, two_ranks, four_ranks):
    accuracies = [
        [line["val_accuracy"] for line in lines(folder) if "val_accuracy" in line]
        for folder in (one_rank, two_ranks, four_ranks)
    ]

    assert accuracies[0] == accuracies[1] == accuracies[2]
    assert len(accuracies[0]) == 5
