"""Results do not depend on the number of processes."""

import importlib.util

import pytest
import torch

from tests.trainer.ranks import (
    CHECKOUT,
    FOUR_EPOCHS,
    lines,
    losses,
    train_alone,
    weights,
)
from trainer.arguments import parse
from trainer.errors import ConfigError
from trainer.parallel import layout
from trainer.parallel.process_group import DistributedContext

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

ROUNDING = 1e-6
"""Of the loss over the first 50 steps; measured: 4e-7. Single precision, summed in another order;
the difference grows with each step, to 1.3e-6 after 66."""
WEIGHTS = 1e-3
"""Of any weight after all 68 steps; measured: 2e-5 on one processor, 3e-4 on another."""


def test_results_are_those_of_one_rank(one_rank, two_ranks, once):
    """`tests/test_same_numbers.py` has those of several nodes, with a torchrun each."""
    expected = losses(one_rank)
    assert list(expected) == list(range(1, 69))
    assert expected[1] > 2
    assert expected[68] < 0.5
    for folder in (two_ranks, once(4, *FOUR_EPOCHS)):
        first = dict(list(losses(folder).items())[:50])
        assert first == pytest.approx({step: expected[step] for step in first}, rel=0, abs=ROUNDING)
        assert (weights(folder) - weights(one_rank)).abs().max() < WEIGHTS
        assert accuracies(folder) == accuracies(one_rank)
    assert len(accuracies(one_rank)) == 5


def accuracies(folder):
    return [line["val_accuracy"] for line in lines(folder) if "val_accuracy" in line]


@pytest.mark.parametrize("world", [1, 2])
def test_data_parallel_needs_one_process_and_a_gpu(world, monkeypatch):
    """With a GPU, two ranks are still one too many."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: world == 2)
    context = DistributedContext(0, world, torch.device("cpu"))
    with pytest.raises(ConfigError, match="dp requires one process and a GPU"):
        layout.Layout(parse(["--strategy", "dp"]), context)


def test_data_parallel_trains_as_one_process_does(tmp_path, monkeypatch, capsys):
    """With two parts on the CPU, as the tutorial has it, because nn.DataParallel needs GPUs."""
    file = CHECKOUT / "examples/tutorials/dp-or-ddp/measure.py"
    spec = importlib.util.spec_from_file_location("dp_or_ddp", file)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    steps = (*FOUR_EPOCHS, "--steps", "8")
    train_alone(tmp_path / "single", *steps)
    monkeypatch.setattr(torch.nn, "DataParallel", example.CpuDataParallel)
    monkeypatch.setattr(layout, "_size_problems", lambda *_: ())
    train_alone(tmp_path / "dp", *steps, "--strategy", "dp")
    assert "--strategy ddp gives the same results faster" in capsys.readouterr().out
    expected = losses(tmp_path / "single")
    assert list(expected) == list(range(1, 9))
    assert losses(tmp_path / "dp") == pytest.approx(expected, rel=0, abs=ROUNDING)
    assert (weights(tmp_path / "dp") - weights(tmp_path / "single")).abs().max() < ROUNDING
