"""Pipelines of models that are no `nn.Sequential`."""

import pytest

from tests.nightly import few
from tests.trainer.ranks import all_lines, losses

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

ROUNDING = 1e-6
PIPELINES = {
    "pp": ("--micro-batches", "4"),
    "pp --schedule gpipe": ("--micro-batches", "2"),
    "pp-dp": ("--micro-batches", "2"),
    "pp-dp --schedule interleaved": ("--micro-batches", "2"),
    "pp-fsdp": ("--micro-batches", "2", "--checkpoint-activations"),
    "pp-fsdp --schedule interleaved": ("--micro-batches", "2"),
    "pp-tp": ("--micro-batches", "2"),
}
EACH_KIND = ("pp", "pp-fsdp --schedule interleaved", "pp-tp")
"""The others are for the night."""


def words(strategy, *more):
    task = ("--task", "tests.trainer.own_tasks:cut", "--no-tensorboard", "--epochs", "9")
    steps = ("--steps", "8", "--batch-size", "16", "--log-every", "1", "--clip", "0.5")
    return (*task, *steps, "--strategy", *strategy.split(), *more)


def cut(strategy, *more):
    return words(strategy, "--balance", "layers", *more)


@pytest.fixture
def alone(once):
    return once(1, *words("single"))


@pytest.mark.parametrize("pipeline", few(PIPELINES, *EACH_KIND))
def test_a_pipeline_trains_like_one_process(pipeline, four, alone, tmp_path):
    four.train(tmp_path, *cut(pipeline, *PIPELINES[pipeline]))

    assert len(losses(tmp_path)) == 8
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=ROUNDING)
    assert last(tmp_path, "val_loss") == pytest.approx(last(alone, "val_loss"), rel=ROUNDING)
    assert last(tmp_path, "val_accuracy") == last(alone, "val_accuracy")


def test_a_rank_keeps_only_its_stage_of_the_model(four, alone, tmp_path):
    four.train(tmp_path, *cut("pp", "--micro-batches", "4"))

    # the last of four stages has a layer of 6, norm and head; the model 4 layers and an embedding
    assert (last(tmp_path, "val_held"), last(alone, "val_held")) == (9, 28)


@pytest.mark.parametrize("model", ["pairs", "in-place"])
def test_other_models_with_the_same_numbers_train_alike(four, model, alone, tmp_path):
    """Layers return something besides the hidden states; what comes first is changed in place."""
    four.train(tmp_path, *cut("pp", "--micro-batches", "4", "--task-option", f"model={model}"))

    assert losses(tmp_path) == pytest.approx(losses(alone), rel=ROUNDING)


def last(folder, name):
    return [line[name] for line in all_lines(folder) if name in line][-1]


def test_another_strategy_resumes_a_pipeline_and_the_other_way_round(four, alone, tmp_path):
    four.train(tmp_path, *cut("pp-fsdp", "--micro-batches", "2", "--steps", "3"))
    four.train(tmp_path, *words("zero3", "--steps", "5"))
    four.train(tmp_path, *cut("pp", "--micro-batches", "4", "--steps", "8"))

    assert losses(tmp_path) == pytest.approx(losses(alone), rel=ROUNDING)


def test_stages_are_balanced_by_measured_time(pools, tmp_path):
    (printed,) = pools[1].train(tmp_path, *words("pp", "--steps", "1"))

    assert "1 stages by time: [blocks.0 blocks.1 blocks.2 blocks.3]" in printed


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tied", "head.weight are the same tensor in several pipeline stages: untie them"),
        ("ahead", "a value computed before its layers is also used after them"),
        ("own", "the model has parameters that nothing"),
        ("used-pairs", "running a stage alone failed: TypeError"),
        ("twice", "its layers are not called exactly once each, in order"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(four, model, message, tmp_path):
    chosen = ("--micro-batches", "4", "--task-option", f"model={model}")
    errors = four.try_to_train(tmp_path, *cut("pp", *chosen))

    assert all(error.startswith("ConfigError: ") and message in error for error in errors), errors
