"""How many ranks each dimension gets, and where each rank is. Needs no other rank."""

import pytest
import torch

from deploykit.cli import main as cli
from deploykit.job import file as jobfile
from tests.trainer.ranks import train
from trainer.errors import ConfigError
from trainer.parallel.layout import Layout, ParallelDims
from trainer.parallel.process_group import DistributedContext

pytestmark = pytest.mark.torch

DEFAULTS = {
    "ddp": (1, 16, 1, 1, 1),
    "zero3": (1, 1, 16, 1, 1),
    "zero3 --context-parallel 4": (1, 1, 4, 4, 1),
    "hsdp": (1, 2, 8, 1, 1),
    "hsdp --context-parallel 2": (1, 2, 4, 2, 1),
    "tp": (1, 1, 1, 1, 16),
    "tp-dp": (1, 2, 1, 1, 8),
    "fsdp-tp": (1, 1, 2, 1, 8),
    "fsdp-tp --context-parallel 4": (1, 1, 2, 4, 2),
    "hsdp-tp": (1, 2, 4, 1, 2),
    "pp": (16, 1, 1, 1, 1),
    "pp-dp": (2, 8, 1, 1, 1),
    "pp-fsdp": (2, 1, 8, 1, 1),
    "pp-tp": (2, 1, 1, 1, 8),
    "pp-fsdp-tp": (2, 1, 4, 1, 2),
    "pp-hsdp-tp": (2, 1, 4, 1, 2),
}
"""Stages, replicas, shards, parts of a sequence and tensor-parallel ranks of two nodes with eight
ranks each."""


def layout(words, rank=0, world=16):
    return Layout(train.parse(words), DistributedContext(rank, world, torch.device("cpu")))


@pytest.mark.parametrize("strategy", DEFAULTS)
def test_defaults_use_all_ranks_and_keep_what_communicates_most_in_a_node(strategy, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    heads = ("--task", "text", "--width", "64", "--heads", "16")
    batch = ("--micro-batches", "16", "--batch-size", "256")
    words = ["--strategy", *strategy.split(), *heads, *batch]
    assert layout(words).dims == DEFAULTS[strategy]


@pytest.mark.parametrize(
    ("strategy", "version", "newer"),
    [("tp", "2.9.1+cu128", "2.10"), ("pp-dp", "2.9.1", "2.10"), ("zero3", "2.6.0", "2.7")],
)
def test_a_pytorch_that_is_too_old_is_named(strategy, version, newer, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ConfigError, match=f"requires PyTorch {newer} .*this is {version[:5]}"):
        layout(["--strategy", strategy])
    monkeypatch.setattr(torch, "__version__", newer + ".0")
    layout(["--strategy", strategy, *["--micro-batches=2"] * strategy.startswith("pp")])


def test_each_rank_has_a_place_of_its_own_and_tensor_parallel_ranks_are_neighbors():
    dims = ParallelDims(pp=2, dp_replicate=3, dp_shard=2, tp=2)
    places = [dims.position(rank) for rank in range(dims.ranks)]

    assert len(set(places)) == dims.ranks == 24
    assert places[0] == (0, 0, 0, 0, 0)
    assert places[1] == (0, 0, 0, 0, 1)
    assert places[-1] == (1, 2, 1, 0, 1)


def test_each_sample_belongs_to_one_data_shard_and_one_rank_of_it_has_the_loss():
    words = ["--strategy", "pp-fsdp-tp", "--micro-batches", "2"]
    ranks = [layout(words, rank, 8) for rank in range(8)]
    shards = [place.position.dp_shard for place in ranks if place.contributes_loss]

    assert sorted(shards) == [0, 1]


def test_the_trainer_accepts_three_dimensions_that_are_advised(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    argv = ["--parameters", "7B", "--gpu", "a100-40gb", "--gpus-per-node", "8", "--nodes", "2"]
    argv += ["--batch-size", "128", "--sequence", "2048", "--write", str(path)]
    assert cli.main(["advise", *argv]) == 0
    assert "Use pp-fsdp-tp" in capsys.readouterr().out

    dims = layout(jobfile.parse(path)[0]["entrypoint"]["args"]).dims
    assert dims.ranks == 16
    assert min(dims.pp, dims.dp_shard, dims.tp) > 1
