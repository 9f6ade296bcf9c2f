"""A pipeline trains like one process, divides a model well, and measures its bubble."""

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
from trainer.data import Batch
from trainer.objective import Objective
from trainer.parallel.pipeline import ideal_bubble
from trainer.parallel.stages import Cut, Layer, split
from trainer.task import Task

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


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return ("--text", str(write_help_topics(tmp_path_factory.mktemp("text") / "text", 24_000)))


@pytest.fixture
def trained(once, text):
    """The folder of a run on so many ranks."""

    def folder(world, *options, steps=STEPS, double=False):
        return once(world, *COMMON, *text, *options, "--steps", str(steps), double=double)

    return folder


@pytest.mark.parametrize("schedule", few(["gpipe", "1f1b", "interleaved"], "interleaved"))
@pytest.mark.parametrize("layout", few(LAYOUTS, "4 ranks", "2 pipelines with FSDP"))
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


def test_stages_are_logged(text, tmp_path, capsys):
    given = (*COMMON, *text, "--strategy", "pp", "--micro-batches", "2", "--steps", "3")
    ranks.train_alone(tmp_path, *given)

    plan = (
        r"pipeline: 1f1b, 2 micro-batches, 1 stages by time: \[embed block0 .* head\] \d+\.\d\d ms"
    )
    assert re.search(plan + "; bubble 0.0% if stages are equal", capsys.readouterr().out)


def test_divisions_are_optimal():
    """Compared with all divisions of small models; every stage has parameters."""
    chance = random.Random(0)
    for _ in range(50):
        costs = [chance.choice([0, 1, 1, 5, 20]) for _ in range(chance.randint(4, 8))]
        owners = [chance.random() < 0.8 or number < 4 for number in range(len(costs))]
        stages = chance.randint(1, 4)
        slowest = min(
            max(sum(costs[a:b]) for a, b in pairs)
            for inner in itertools.combinations(range(1, len(costs)), stages - 1)
            for pairs in [list(itertools.pairwise((0, *inner, len(costs))))]
            if all(any(owners[a:b]) for a, b in pairs)
        )
        found = split(layers(owners), stages, costs)
        assert [number for stage in found for number in stage] == list(range(len(costs)))
        assert max(sum(costs[number] for number in stage) for stage in found) == slowest
        assert all(any(owners[number] for number in stage) for stage in found)
        assert len(found) == stages

    with pytest.raises(ValueError, match="cannot make 4 pipeline stages from 3 layers"):
        split(layers([True, False, True, True]), 4, [1, 9, 2, 1])


def layers(owners):
    return [Layer("a", torch.empty(5, device="meta"), each) for each in owners]


def test_measuring_leaves_statistics_and_random_numbers_as_they_were():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_numbers = torch.get_rng_state()
    sample = Batch(torch.ones(16, 4), torch.ones(16, dtype=torch.long), 16, 16)
    task, cpu = Task(lambda: model, training=[]), torch.device("cpu")
    cut = Cut(model, None, sample, Objective(train.parse([]), task, cpu))

    assert all(seconds > 0 for seconds in cut.measure(cpu))
    assert random_numbers.equal(torch.get_rng_state())
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


def test_the_bubble_of_equal_stages_follows_the_formula():
    assert ideal_bubble(4, 4) == pytest.approx(3 / 7)
    assert ideal_bubble(4, 4, stages_per_rank=2) == pytest.approx(3 / 11)


def logged(folder, name):
    return [line[name] for line in ranks.lines(folder) if name in line]
