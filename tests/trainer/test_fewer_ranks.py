"""Ranks of a job that has lost nodes: the global batch and the numbers stay."""

import pytest
import torch

import train
from tests.trainer import ranks
from tests.trainer.rank_pool import RankPool
from trainer.errors import ConfigError
from trainer.parallel.layout import Layout, accumulate
from trainer.parallel.process_group import DistributedContext

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

TASK = ("--task", "digits", "--batch-size", "20", "--steps", "6", "--epochs", "1", "--lr", "0.01")
WORDS = (*TASK, "--log-every", "1", "--no-tensorboard")


def three(*words):
    """Options and context of rank 0 of three."""
    return train.parse([*TASK, *words]), DistributedContext(0, 3, torch.device("cpu"))


@pytest.mark.parametrize(("full", "parts"), [("3", 1), ("4", 2), ("6", 2), ("8", 3)])
def test_no_rank_has_more_samples_at_once(full, parts, monkeypatch, capsys):
    monkeypatch.setenv("DEPLOYKIT_FULL_WORLD_SIZE", full)
    options, context = three("--strategy", "ddp", "--micro-batches", "2")
    options = accumulate(options, context)
    assert options.micro_batches == 2 * parts
    assert (f"3 of {full} ranks" in capsys.readouterr().out) == (parts > 1)
    Layout(options, context)  # 20 samples need not be a multiple of three ranks


def test_a_pipeline_still_needs_batches_of_equal_size(monkeypatch):
    monkeypatch.setenv("DEPLOYKIT_FULL_WORLD_SIZE", "4")
    options, _ = three("--strategy", "pp-dp", "--pipeline-parallel", "2", "--micro-batches", "2")
    context = DistributedContext(0, 6, torch.device("cpu"))
    with pytest.raises(ConfigError, match="--batch-size 20 must be a multiple of 6"):
        Layout(options, context)


@pytest.fixture(scope="module")
def three_of_four(tmp_path_factory):
    pool = RankPool(3, tmp_path_factory.mktemp("ranks"))
    pool.variables = {"DEPLOYKIT_FULL_WORLD_SIZE": "4"}
    yield pool
    pool.close()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_three_of_four_ranks_have_the_losses_of_one_process(
    strategy, three_of_four, once, tmp_path
):
    log, *_ = three_of_four.train(tmp_path, *WORDS, "--strategy", strategy)
    one = once(1, *WORDS, "--strategy", "single")
    assert "3 of 4 ranks: 2 micro-batch(es) for the same global batch" in log
    assert len(ranks.losses(one)) == 6
    assert ranks.losses(tmp_path) == pytest.approx(ranks.losses(one), rel=1e-6)
