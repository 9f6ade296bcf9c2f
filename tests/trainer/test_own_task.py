"""`--task package.module:function`: models, data and losses that the trainer has never seen."""

import pytest
import torch

import evaluate
from tests.nightly import few
from tests.trainer.ranks import TRAIN, call, latest, lines, losses, outputs, start
from trainer.arguments import parse
from trainer.checkpoint import checkpointer as checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

TASKS = "tests.trainer.own_tasks"
STEPS = ("--steps", "12", "--epochs", "9", "--batch-size", "16", "--log-every", "1")
DATA_PARALLEL = ("ddp", "manual", "zero1", "zero2", "zero3", "hsdp")
ROUNDING = 1e-6
"""Relative, of the loss in 12 steps: single precision, summed in another order."""


def words(task, *more):
    return ("--task", f"{TASKS}:{task}", "--no-tensorboard", *STEPS, *more)


@pytest.fixture
def alone(once):
    """The losses of a task in one process."""
    return lambda *task: losses(once(1, *words(*task, "--strategy", "single")))


@pytest.mark.parametrize("strategy", few(DATA_PARALLEL, "ddp", "zero3"))
@pytest.mark.parametrize(
    "task",
    [("regression",), ("language",), ("language", "--task-option", "loss=scalar"), ("stream",)],
    ids=["regression", "language", "language-scalar", "stream"],
)
def test_every_data_parallel_strategy_trains_like_one_process(
    four, alone, tmp_path, task, strategy
):
    shard = ("--shard-ranks", "2") if strategy == "hsdp" else ()
    four.train(tmp_path, *words(*task, "--strategy", strategy, *shard))
    expected = alone(*task)
    assert len(expected) == 12
    assert losses(tmp_path) == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize(
    ("task", "strategy", "options"),
    [
        ("sequence", "pp-dp", ("--micro-batches", "4", "--balance", "layers")),
        ("sequence", "pp-fsdp", ("--micro-batches", "2", "--balance", "layers")),
        ("ratings", "pp-dp", ("--micro-batches", "2", "--balance", "layers")),
        ("streamed_sequence", "pp-dp", ("--micro-batches", "2", "--balance", "layers")),
        ("planned", "tp", ()),
        ("planned", "tp-dp", ("--tensor-parallel", "2")),
        ("planned", "fsdp-tp", ("--tensor-parallel", "2")),
    ],
)
def test_pipelines_and_tensor_parallelism_take_models_that_fit(
    four, alone, tmp_path, task, strategy, options
):
    four.train(tmp_path, *words(task, "--strategy", strategy, *options))
    assert losses(tmp_path) == pytest.approx(alone(task), rel=ROUNDING)


@pytest.mark.parametrize(
    ("task", "strategy", "message"),
    [
        ("language", "pp", "into pipeline stages: blocks.1 does not accept the output of blocks.0"),
        ("regression", "pp", "the last batch of the training data has 3 samples, and only integer"),
        ("misspelled", "tp", "frist, which Net does not have: did you mean first?"),
        (
            "regression",
            "tp",
            "Net has no tensor-parallel plan: return one for",
        ),
    ],
)
def test_a_model_that_does_not_fit_a_strategy_is_refused(four, tmp_path, task, strategy, message):
    options = ("--micro-batches", "4") if strategy == "pp" else ()
    errors = four.try_to_train(tmp_path, *words(task, "--strategy", strategy, *options))
    assert all(error.startswith("ConfigError: ") and message in error for error in errors)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_micro_batches_recomputation_and_workers_change_nothing(four, alone, tmp_path, strategy):
    """The last batch has 3 samples: most micro-batches of most ranks are empty."""
    features = ("--micro-batches", "2", "--checkpoint-activations", "--workers", "2")
    four.train(tmp_path, *words("regression", "--strategy", strategy, *features))
    assert losses(tmp_path) == pytest.approx(alone("regression"), rel=ROUNDING)


def test_batches_of_similar_length_are_the_same_on_every_layout(four, alone, tmp_path):
    four.train(tmp_path, *words("sorted_language", "--strategy", "zero3"))
    expected = alone("sorted_language")
    assert losses(tmp_path) == pytest.approx(expected, rel=ROUNDING)
    assert expected != pytest.approx(alone("language"), rel=ROUNDING)


@pytest.mark.parametrize("workers", ["0", "3"])
def test_a_stream_goes_on_where_it_was(four, alone, tmp_path, workers):
    """A pass has 5 batches: the run stops in the second one, and resumes in the third."""
    options = ("--strategy", "ddp", "--workers", workers, "--checkpoint-steps", "1")
    for steps in ("7", "12"):
        four.train(tmp_path, *words("stream", *options, "--steps", steps))
    assert losses(tmp_path) == pytest.approx(alone("stream"), rel=ROUNDING)


@pytest.mark.parametrize(
    ("before", "after"), [("single", "single"), ("ddp", "zero3"), ("zero2", "ddp")]
)
def test_a_run_with_unused_frozen_and_tied_parameters_resumes(
    pools, alone, tmp_path, before, after
):
    for strategy, steps in ((before, "5"), (after, "12")):
        pool = pools[1 if strategy == "single" else 4]
        pool.train(tmp_path, *words("language", "--strategy", strategy, "--steps", steps))
    assert losses(tmp_path) == pytest.approx(alone("language"), rel=ROUNDING)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_an_optimizer_and_a_schedule_of_ones_own_resume(four, alone, tmp_path, strategy):
    for steps in ("7", "12"):
        four.train(tmp_path, *words("scheduled", "--strategy", strategy, "--steps", steps))
    rates = [line["lr"] for line in lines(tmp_path) if "lr" in line]
    expected = [0.01 * (0.1 + 0.9 * step / 4) for step in range(4)]
    expected += [0.01 * 0.8**step for step in range(8)]

    assert rates == pytest.approx(expected)
    assert losses(tmp_path) == pytest.approx(alone("scheduled"), rel=ROUNDING)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_scores_are_freed_before_the_backward_pass(four, tmp_path, strategy):
    """For a large vocabulary they are the largest tensor of all."""
    options = ("--precision", "bf16", "--micro-batches", "2")
    four.train(tmp_path, *words("freed", "--strategy", strategy, *options))
    assert len(losses(tmp_path)) == 12


def test_the_statistics_of_a_checkpoint_are_the_mean_of_all_ranks(four, once, tmp_path):
    """With one update per run, the mean of the ranks' means is the mean of all samples."""
    options = words("normalized", "--steps", "1", "--batch-size", "96")
    four.train(tmp_path, *options, "--strategy", "zero2")
    one = once(1, *options, "--strategy", "single")
    assert_equal_statistics(tmp_path, one, "running_mean")


def assert_equal_statistics(folder, other, *names):
    made, expected = (checkpoint.read(latest(each)) for each in (folder, other))
    for name in names:
        torch.testing.assert_close(*(each[f"model.body.1.{name}"] for each in (made, expected)))


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "hsdp"])
def test_synchronized_batch_normalization_is_that_of_one_process(four, once, tmp_path, strategy):
    """Losses, and the statistics in a checkpoint.

    By SGD: the bias before a normalization has no gradient but rounding, which AdamW enlarges.
    """
    shard = ("--shard-ranks", "2") if strategy == "hsdp" else ()
    synchronized = ("--sync-batchnorm", "--batch-size", "32", "--lr", "0.01", "--optimizer", "sgd")
    four.train(tmp_path, *words("normalized", *synchronized, "--strategy", strategy, *shard))
    one = once(1, *words("normalized", *synchronized, "--strategy", "single"))

    assert losses(tmp_path) == pytest.approx(losses(one), rel=ROUNDING)
    assert_equal_statistics(tmp_path, one, "running_mean", "running_var", "num_batches_tracked")


def test_without_it_batch_normalization_depends_on_the_ranks(four, once, tmp_path):
    options = words("normalized", "--batch-size", "32", "--lr", "0.01")
    four.train(tmp_path, *options, "--strategy", "ddp")
    one = once(1, *options, "--strategy", "single")

    assert losses(tmp_path)[12] != pytest.approx(losses(one)[12], rel=1e-3)


def test_an_evaluation_does_not_import_the_task_that_a_checkpoint_names(pools, tmp_path):
    """A checkpoint is untrusted."""
    pools[1].train(tmp_path, *words("sequence", "--strategy", "single", "--steps", "1"))
    with pytest.raises(SystemExit, match="it belongs to your own task"):
        call(evaluate, tmp_path / "checkpoints", tmp_path)


def test_a_mistake_in_your_code_keeps_its_traceback(tmp_path):
    (text,) = outputs([start([TRAIN, *words("broken")], tmp_path)], code=1)
    assert "Traceback" in text
    assert "KeyError: 'my own mistake'" in text
    assert "own_tasks.py" in text


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (f"{TASKS}:missing", f"the module {TASKS} has no function missing"),
        ("tests.nowhere:task", "module tests.nowhere not found in"),
        (f"{TASKS}:nothing", "returned Linear, not a trainer.task.Task"),
        (f"{TASKS}:stream", "training data without a length requires --steps"),
        (f"{TASKS}:short_of_lengths", "`lengths` has 2 numbers for 51 samples"),
        (f"{TASKS}:stream_with_lengths", "but this is a stream"),
        (f"{TASKS}:plateau", "ReduceLROnPlateau needs the validation loss"),
    ],
)
def test_a_task_that_cannot_be_used_is_one_line(pools, tmp_path, task, message):
    (error,) = pools[1].try_to_train(tmp_path, "--task", task, "--strategy", "single")
    assert error.startswith("ConfigError: ")
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "digit"], "must be digits, text, or your own function"),
        (["--task-option", "rows"], "--task-option rows must be KEY=VALUE"),
    ],
)
def test_a_word_that_names_no_task_is_refused(capsys, words, message):
    with pytest.raises(SystemExit) as refused:
        parse(words)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
