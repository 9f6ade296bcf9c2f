"""A pipeline trains like one process, partitions a model well, and measures its bubble."""

import itertools
import random
import re

import pytest
import torch
from torch import nn

from tests.nightly import few
from tests.trainer import ranks
from tests.trainer.rank_pool import write_help_topics
from tests.trainer.ranks import train
from trainer.measure import bubble
from trainer.parallel import partition
from trainer.parallel.layout import Layout
from trainer.parallel.partition import MeasuredLayer
from trainer.parallel.process_group import DistributedContext

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("pipeline")]

STEPS = 6
COMMON = ("--task", "text", "--batch-size", "16", "--layers", "6", "--width", "32")
COMMON += ("--sequence", "32", "--epochs", "9", "--log-every", "1", "--no-tensorboard")
FEATURES = ("--clip", "0.5", "--checkpoint-activations", "--optimizer", "sgd", "--lr", "0.1")

LAYOUTS = {
    "2 ranks": (2, "pp", "4"),
    "4 ranks": (4, "pp", "4"),
    "2 pipelines with DDP": (4, "pp-dp", "2"),
    "2 pipelines with FSDP": (4, "pp-fsdp", "2"),
}
"""World, strategy, micro-batches."""

HALF = {
    "bf16": (("--strategy", "pp", "--precision", "bf16"), 1e-6),
    "fp16": (("--strategy", "pp", "--precision", "fp16", "--clip", "0.5"), 2e-4),
    "fp16, FSDP": (("--strategy", "pp-fsdp", "--precision", "fp16", "--clip", "0.5"), 2e-4),
}
"""Options, and the tolerance of the loss to that of one process in the same precision. With bf16 it
is equal. With fp16, loss scale and clipping multiply by a norm that is summed in another order, and
the last of 11 bits is 5e-4 of a value."""

REFUSED = {
    "--strategy pp --pipeline-parallel 2": "remove that option, or use pp-dp for several",
    "--strategy pp --micro-batches 2": "must be at least the 4 stages for --schedule 1f1b",
    "--strategy pp --micro-batches 6 --schedule interleaved": "multiple of the 4 ranks",
    "--strategy pp --micro-batches 8 --stages-per-rank 2": "only interleaved has several stages",
    "--strategy pp --schedule interleaved --stages-per-rank 1 --micro-batches 4": "at least 2",
    "--strategy pp-dp --pipeline-parallel 3 --micro-batches 4": ": use 2",
    "--strategy pp-fsdp --pipeline-parallel 4 --micro-batches 4": ": use 2",
}
"""Options that do not fit four ranks, and a part of the message."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return ("--text", str(write_help_topics(tmp_path_factory.mktemp("text") / "text", 24_000)))


@pytest.fixture(scope="module")
def trained(pools, text, tmp_path_factory):
    """The folder of a run on so many ranks, trained on first use."""
    folders = {}

    def folder(world, *options, steps=STEPS, double=False):
        key = (world, options, steps, double)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("run")
            given = (*COMMON, *text, *options, "--steps", str(steps))
            pools[world].train(folders[key], *given, double=double)
        return folders[key]

    return folder


@pytest.mark.parametrize("schedule", few(["gpipe", "1f1b", "interleaved"], "interleaved"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_those_of_one_process(layout, schedule, trained):
    """With clipping and activation checkpointing."""
    world, strategy, pieces = LAYOUTS[layout]
    ways = ("--strategy", strategy, "--schedule", schedule, "--micro-batches", pieces)
    run = trained(world, *FEATURES, *ways)
    one = trained(1, *FEATURES, "--strategy", "single")

    assert logged(run, "loss") == pytest.approx(logged(one, "loss"), rel=0, abs=1e-6)
    assert logged(run, "gradient_norm") == pytest.approx(logged(one, "gradient_norm"), rel=1e-5)
    assert logged(run, "val_loss") == pytest.approx(logged(one, "val_loss"), rel=0, abs=1e-6)
    assert logged(run, "val_accuracy") == logged(one, "val_accuracy")
    assert (ranks.weights(run) - ranks.weights(one)).abs().max() < 1e-6
    assert all(0 < share < 1 for share in logged(run, "bubble")[1:])


@pytest.mark.parametrize("name", HALF)
def test_results_in_half_precision_are_those_of_one_process(name, trained):
    options, tolerance = HALF[name]
    pieces = ("--micro-batches", "4")
    run = trained(4, *options, *pieces, steps=4)
    one = trained(1, "--strategy", "single", *options[2:], *pieces, steps=4)

    assert logged(run, "loss") == pytest.approx(logged(one, "loss"), rel=0, abs=tolerance)


def test_a_checkpoint_goes_from_any_strategy_to_any_other(pools, trained, text, tmp_path):
    """Each resumes the previous one, with AdamW's moments. In double precision, because AdamW makes
    large steps of the rounding of tiny gradients.
    """
    relay = [
        (1, "--strategy", "single"),
        (4, "--strategy", "pp", "--schedule", "interleaved", "--micro-batches", "4"),
        (2, "--strategy", "ddp"),
        (4, "--strategy", "pp-fsdp", "--micro-batches", "4"),
        (2, "--strategy", "pp", "--schedule", "gpipe", "--balance", "layers"),
        (4, "--strategy", "pp-dp", "--micro-batches", "2"),
        (1, "--strategy", "single"),
    ]
    for number, (world, *options) in enumerate(relay, 1):
        given = (*COMMON, *text, *options, "--steps", str(2 * number))
        pools[world].train(tmp_path, *given, double=True)
        assert ranks.saved_step(tmp_path) == 2 * number

    whole = trained(1, "--strategy", "single", steps=2 * len(relay), double=True)
    assert len(logged(tmp_path, "loss")) == 2 * len(relay)
    assert logged(tmp_path, "loss") == pytest.approx(logged(whole, "loss"), rel=0, abs=1e-12)
    assert (ranks.weights(tmp_path) - ranks.weights(whole)).abs().max() < 1e-12


def test_stages_and_bubble_are_logged(text, tmp_path, capsys):
    given = (*COMMON, *text, "--strategy", "pp", "--micro-batches", "2", "--steps", "3")
    ranks.train_alone(tmp_path, *given)

    printed = capsys.readouterr().out
    plan = (
        r"pipeline: 1f1b, 2 micro-batches, 1 stages by time: \[embed block0 .* head\] \d+\.\d\d ms"
    )
    assert re.search(plan + "; bubble 0.0% predicted, 0.0% ideal", printed)
    assert re.search(r"pipeline: bubble \d+\.\d% measured \(by rank: \d+\.\d%\)", printed)


@pytest.mark.parametrize("arguments", REFUSED)
def test_invalid_combinations_are_refused(arguments):
    with pytest.raises(ValueError, match=re.escape(REFUSED[arguments])):
        Layout(train.parse(arguments.split()), DistributedContext(0, 4, torch.device("cpu")))


def test_a_batch_that_cannot_be_divided_is_refused(pools, text, tmp_path):
    ways = ("--strategy", "pp-dp", "--micro-batches", "4", "--batch-size", "12")
    error = (
        "ConfigError: --batch-size 12 must be a multiple of 8: "
        "2 data shard(s) times 4 micro-batch(es)"
    )
    assert pools[4].try_to_train(tmp_path, *COMMON, *text, *ways) == [error] * 4


def test_pipeline_options_are_refused_by_other_strategies(capsys):
    with pytest.raises(SystemExit):
        train.parse(["--strategy", "ddp", "--schedule", "gpipe"])

    assert (
        "--schedule requires --strategy pp or pp-dp or pp-fsdp or pp-tp" in capsys.readouterr().err
    )


def test_partitions_are_optimal():
    """Compared with all partitions of small models."""
    chance = random.Random(0)
    for _ in range(50):
        layers = [layer(chance.choice([0, 1, 1, 5, 20])) for _ in range(chance.randint(4, 8))]
        stages = chance.randint(1, 4)
        slowest = min(
            max(sum(each.seconds for each in layers[a:b]) for a, b in itertools.pairwise(ends))
            for inner in itertools.combinations(range(1, len(layers)), stages - 1)
            for ends in [(0, *inner, len(layers))]
        )

        cut = partition.by_time(layers, stages)
        assert [each for stage in cut for each in stage] == layers
        assert max(sum(each.seconds for each in stage) for stage in cut) <= 1.02 * slowest
        assert len(cut) == stages


def test_of_equally_fast_partitions_the_one_that_sends_less_is_chosen():
    layers = [layer(1, size=10), layer(0.001, size=1), layer(0.001, size=10), layer(1)]
    assert [len(stage) for stage in partition.by_time(layers, 2)] == [2, 2]


def test_measuring_leaves_statistics_and_random_numbers_as_they_were():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_numbers = torch.get_rng_state()

    partition.measure_layers(model, torch.ones(16, 4), lambda layer, x: layer(x), torch.sum)

    assert random_numbers.equal(torch.get_rng_state())
    assert before.keys() == model.state_dict().keys()
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_every_stage_has_parameters():
    layers = [layer(1), layer(9, has_parameters=False), layer(2), layer(1)]
    assert [len(stage) for stage in partition.by_time(layers, 3)] == [2, 1, 1]

    with pytest.raises(ValueError, match="cannot make 4 pipeline stages of 3 layers"):
        partition.by_time(layers, 4)


def test_by_layers_only_the_number_of_layers_counts():
    layers = [layer(seconds) for seconds in (1, 1, 1, 9, 9, 9)]
    assert [len(stage) for stage in partition.by_layers(layers, 3)] == [2, 2, 2]
    assert [len(stage) for stage in partition.by_time(layers, 3)] == [4, 1, 1]


def test_unequal_stages_have_a_larger_bubble():
    for ranks_, pieces, per_rank in itertools.product((2, 4), (4, 16), (1, 2)):
        equal = bubble.predicted([0.1] * ranks_, pieces, per_rank)
        assert equal == pytest.approx(bubble.ideal(ranks_, pieces, per_rank))
        assert bubble.predicted([0.1] * (ranks_ - 1) + [0.2], pieces, per_rank) > equal


def layer(seconds, *, size=5, has_parameters=True):
    return MeasuredLayer("a", seconds, torch.empty(size, device="meta"), has_parameters)


def logged(folder, name):
    return [line[name] for line in ranks.lines(folder) if name in line]
