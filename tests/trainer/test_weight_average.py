"""`--ema` evaluates and exports an average of the weights, and settings of single parameters."""

import pytest
import torch

from tests.nightly import few
from tests.trainer import ranks
from trainer.checkpoint import checkpointer as checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

TASKS = "tests.trainer.own_tasks"
DECAY = 0.8
LAYOUTS = dict.fromkeys(("single", "ddp", "zero1", "zero2", "zero3"), ()) | {
    "hsdp": ("--shard-ranks", "2"),
    "fsdp-tp": ("--tensor-parallel", "2"),
}
SAVING = ("--checkpoint-steps", "1", "--keep", "9")


def words(strategy, *more):
    task = ("--task", f"{TASKS}:decoder", "--no-tensorboard", "--epochs", "9", "--batch-size", "16")
    ways = ("--strategy", strategy, *LAYOUTS[strategy])
    return (*task, *ways, "--log-every", "1", "--steps", "6", *more)


def average(*more):
    return ("--ema", str(DECAY), *more)


@pytest.fixture
def alone(once):
    return once(1, *words("single", *average(*SAVING)))


def states(folder):
    """The tensors of each checkpoint, by step."""
    paths = sorted((folder / "checkpoints").glob("step-????????"))
    return {int(path.name[5:]): checkpoint.read(path) for path in paths}


def test_the_average_is_that_of_the_weights_after_each_step(alone):
    saved = states(alone)
    assert [*saved] == [1, 2, 3, 4, 5, 6]
    for step in range(2, 7):
        for name, value in saved[step].items():
            if name.startswith("average."):
                before, weight = saved[step - 1][name], saved[step][f"model.{name[8:]}"]
                expected = DECAY * before + (1 - DECAY) * weight
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)
                assert not value.equal(weight)


def validation(folder):
    return [line["val_loss"] for line in ranks.all_lines(folder) if "val_loss" in line]


@pytest.mark.parametrize("layout", few([*LAYOUTS][1:], "ddp", "zero2", "fsdp-tp"))
def test_every_layout_evaluates_the_average_and_trains_the_weights(layout, four, alone, tmp_path):
    four.train(tmp_path, *words(layout, *average()))

    assert ranks.losses(tmp_path) == pytest.approx(ranks.losses(alone), rel=1e-6)
    assert validation(tmp_path) == pytest.approx(validation(alone), rel=1e-6)


def test_the_average_differs_from_the_weights_in_evaluation(alone, once):
    without = once(1, *words("single"))

    assert ranks.losses(without) == ranks.losses(alone)
    assert validation(without)[-1] != pytest.approx(validation(alone)[-1], rel=1e-4)


def test_a_resumed_run_goes_on_with_the_average(four, alone, tmp_path):
    four.train(tmp_path, *words("zero3", *average("--steps", "3")))
    four.train(tmp_path, *words("zero2", *average()))

    assert validation(tmp_path)[-1] == pytest.approx(validation(alone)[-1], rel=1e-6)


def test_exported_weights_are_the_average(alone):
    exported, state = checkpoint.latest_weights(alone / "checkpoints"), states(alone)[6]

    assert exported["embed.weight"].equal(state["average.embed.weight"])
    assert not exported["embed.weight"].equal(state["model.embed.weight"])


@pytest.mark.parametrize("strategy", ["single", "zero1", "zero3", "fsdp-tp"])
def test_a_parameter_has_settings_of_its_own(strategy, pools, tmp_path):
    """A learning rate of 0 leaves a parameter as it was."""
    options = ("--task-option", "still=embed", "--task-option", "deferred=no")
    pool = pools[1 if strategy == "single" else 4]
    pool.train(tmp_path, *words(strategy, *options, *SAVING))
    saved = states(tmp_path)

    assert saved[1]["model.embed.weight"].equal(saved[6]["model.embed.weight"])
    assert not saved[1]["model.norm.weight"].equal(saved[6]["model.norm.weight"])
