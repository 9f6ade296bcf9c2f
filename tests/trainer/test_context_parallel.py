"""Sequences that several ranks share: the losses and weights of one process, or a refusal.

`test_strategies` has the task "text" with each strategy.
"""

import pytest
import torch

from tests.trainer import ranks
from tests.trainer.ranks import train
from trainer.parallel.layout import Layout
from trainer.parallel.process_group import DistributedContext

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

TASKS = "tests.trainer.context_tasks"
STEPS = ("--steps", "4", "--epochs", "9", "--batch-size", "16", "--log-every", "1")
EXACT = 1e-10
"""Of losses and weights, in double precision."""

TRAINED = {
    "reader": ("4 ddp", "4 zero3 --micro-batches 2 --checkpoint-activations"),
    "reader --task-option model=encoder": ("4 hsdp --shard-ranks 2", "2 zero2"),
    "sentences": ("4 zero3 --checkpoint-activations selective", "4 ddp --context-parallel 4"),
    "values": ("4 zero1", "2 manual"),
}
"""Task to layouts, with two parts of each sequence unless it says otherwise."""

REFUSED = {
    "placeless": "no part of Placeless takes position_ids",
    "careless": "outputs or loss differ by",
    "convolution": "outputs or loss differ by",
    "eager": "requires a model that calls scaled_dot_product_attention, but this one does not",
    "masked": "the attention mask of shape (6, 6) does not cover the 12 keys of the whole sequence",
    "multihead": "does not support nn.MultiheadAttention: use a layer that calls",
    "windowed": "does not support sliding-window attention (8 of",
    "shifting": "or the loss shifts its targets: shift them in",
    "mask": "leave attention_mask out of the batch: causal attention needs no mask for",
    "image": "a tensor in the batch has shape (16, 3, 8), not (batch, 12, ...) like the targets",
    "classes": "requires a target for each position, not one for each sample",
    "odd": "does not divide sequences of 11 positions: pad them to 12",
}


def words(task, layout):
    strategy = layout.split()[1:]
    given = ("--task", *f"{TASKS}:{task}".split(), "--no-tensorboard", *STEPS)
    return (*given, "--strategy", *strategy)


def run(pools, folder, task, layout, *more):
    pools[int(layout[0])].train(folder, *words(task, layout), *more, double=True)
    return folder


def results(folder):
    """Losses of training and of validation."""
    names = ("loss", "val_loss", "test_loss", "val_accuracy")
    return [line[name] for line in ranks.lines(folder) for name in names if name in line]


@pytest.fixture
def alone(once):
    """The folder of a task in one process."""
    return lambda task: once(1, *words(task, "1 single"), double=True)


@pytest.mark.parametrize("task", TRAINED)
def test_losses_and_weights_are_those_of_one_process(task, pools, alone, tmp_path):
    alone = alone(task)
    assert len(results(alone)) > 6
    for number, layout in enumerate(TRAINED[task]):
        parts = () if "--context-parallel" in layout else ("--context-parallel", "2")
        folder = run(pools, tmp_path / str(number), task, layout, *parts)
        assert results(folder) == pytest.approx(results(alone), rel=0, abs=EXACT), layout
        assert (ranks.weights(folder) - ranks.weights(alone)).abs().max() < EXACT, layout


@pytest.mark.parametrize(
    ("before", "after"),
    [("4 zero3 --context-parallel 2", "2 ddp"), ("2 ddp", "4 fsdp --context-parallel 4")],
)
def test_another_layout_resumes(before, after, pools, alone, tmp_path):
    for layout, steps in ((before, "2"), (after, "4")):
        run(pools, tmp_path, "reader", layout, "--steps", steps)
    assert (ranks.weights(tmp_path) - ranks.weights(alone("reader"))).abs().max() < EXACT


def test_half_precision_rounds_as_in_one_process(pools, tmp_path):
    half = ("--precision", "bf16", "--optimizer", "sgd")
    found = []
    for layout in ("1 single", "2 zero3 --context-parallel 2"):
        folder = tmp_path / layout[:1]
        pools[int(layout[0])].train(folder, *words("reader", layout), *half)
        found.append(ranks.losses(folder))
    assert found[0] == pytest.approx(found[1], abs=2e-3)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_divided_is_refused_before_training(what, pools, tmp_path):
    task = f"refused --task-option what={what}"
    layout = "2 zero3 --context-parallel 2"
    errors = pools[2].try_to_train(tmp_path, *words(task, layout))
    assert [error[:13] for error in errors] == ["ConfigError: "] * 2, errors
    assert all(REFUSED[what] in error for error in errors), errors


def test_the_samples_of_one_data_shard_are_refused_on_all_ranks(pools, tmp_path):
    """In batches of two, only the second shard has an odd length: 5, after 4."""
    task = words("sentences --task-option multiple=1", "4 ddp --context-parallel 2")
    errors = pools[4].try_to_train(tmp_path, *task, "--batch-size", "2")
    message = "ConfigError: --context-parallel 2 does not divide sequences of 5 positions"
    assert [error.partition(":")[0] for error in errors] == ["ConfigError"] * 4, errors
    assert all(error.startswith(message) for error in errors)


def test_a_later_batch_that_cannot_be_divided_is_an_error_of_its_ranks(pools, tmp_path):
    """The first samples of the sentences, in order, have an even length; others have not."""
    task = words("sentences --task-option multiple=1", "2 ddp --context-parallel 2")
    errors = pools[2].try_to_train(tmp_path, *task, "--batch-size", "1")
    message = "ValueError: --context-parallel 2 does not divide sequences of"
    assert all(error.startswith(message) for error in errors), errors


def test_ranks_with_other_positions_draw_other_random_numbers():
    words = ["--strategy", "ddp", "--context-parallel", "2", "--task", "text"]
    context = [DistributedContext(rank, 2, torch.device("cpu")) for rank in range(2)]
    streams = [Layout(train.parse(words), each).random_stream for each in context]
    assert streams == [0, 1]
