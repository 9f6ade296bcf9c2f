"""First weights that are made in place: the same bits in any layout, and little memory."""

import sys

import pytest

from tests.nightly import few
from tests.trainer import ranks
from trainer.checkpoint import checkpointer as checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

TASKS = "tests.trainer.own_tasks"
STEP = ("--steps", "1", "--batch-size", "16", "--log-every", "1", "--no-tensorboard", "--lr", "0")
LAYOUTS = {
    "ddp": (),
    "zero2": (),
    "zero3": (),
    "hsdp": ("--shard-ranks", "2"),
    "tp": (),
    "tp-dp": ("--tensor-parallel", "2"),
    "fsdp-tp": ("--tensor-parallel", "2"),
    "zero3-offload": ("--offload",),
}
PEAK = """
import gc, sys, train
from pathlib import Path
from trainer.parallel import process_group
from trainer import tasks
from trainer.arguments import parse
from trainer.parallel.layout import Layout
from trainer.parallel.parallelize import parallelize
from trainer.setup import Setup

def kibibytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

context = process_group.join()
for words in sys.argv[1:]:
    for width in (8, 1448):  # the first one imports what is needed
        options = parse([*words.split(), "--task-option", f"width={width}"])
        setup = Setup(Layout(options, context), tasks.load(options), sample=None)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
        before = kibibytes("VmRSS")
        replica = parallelize(setup)
        grown = kibibytes("VmHWM") - before
        del replica, setup
        gc.collect()
    context.log(grown)
process_group.leave()
"""
"""For each argument, which has the trainer's options, prints how much the memory of rank 0 grew at
most, in KiB, while its weights were made."""
SHARDS = {
    "zero2": 48,
    "zero3": 48,
    "hsdp --shard-ranks 2": 96,
    "tp": 48,
    "tp-dp --tensor-parallel 2": 96,
    "fsdp-tp --tensor-parallel 2": 48,
}
"""MiB that each of four ranks holds of a model of 192, in layers of 8."""
SHARDED = ("zero3", "hsdp --shard-ranks 2", "fsdp-tp --tensor-parallel 2")
"""The others are for the night."""


def words(task, strategy, *more):
    return ("--task", f"{TASKS}:{task}", "--strategy", strategy, *STEP, *more)


def weights(folder):
    """The weights of a run whose learning rate is 0."""
    state = checkpoint.read(ranks.latest(folder))
    return {name: value for name, value in state.items() if name.startswith("model.")}


@pytest.fixture
def alone(once):
    folder = once(1, *words("decoder", "single"))
    return weights(folder), ranks.losses(folder)


@pytest.mark.parametrize("layout", few(LAYOUTS, "ddp", "hsdp", "fsdp-tp", "zero3-offload"))
def test_weights_are_the_same_bits_in_every_layout(layout, four, alone, tmp_path):
    four.train(tmp_path, *words("decoder", layout.removesuffix("-offload"), *LAYOUTS[layout]))
    expected, losses = alone

    made = weights(tmp_path)
    assert made.keys() == expected.keys()
    assert [name for name in made if not made[name].equal(expected[name])] == []
    assert ranks.losses(tmp_path) == pytest.approx(losses, rel=1e-6)


def test_weights_depend_on_the_seed(four, alone, tmp_path):
    four.train(tmp_path, *words("decoder", "zero3", "--seed", "1"))
    made, (expected, _) = weights(tmp_path), alone

    assert not made["model.embed.weight"].equal(expected["model.embed.weight"])
    assert not made["model.blocks.0.up.weight"].equal(made["model.blocks.1.up.weight"])


def test_weights_of_a_pipeline_are_the_same_bits(four, once, tmp_path):
    deferred = ("--task-option", "deferred=yes")
    options = ("--micro-batches", "2", "--balance", "layers", *deferred)
    four.train(tmp_path, *words("sequence", "pp-fsdp", *options))
    made = weights(tmp_path)
    expected = weights(once(1, *words("sequence", "single", *deferred)))

    assert made.keys() == expected.keys()
    assert all(made[name].equal(expected[name]) for name in made)


def test_a_tensor_that_is_left_without_a_value_is_named(four, tmp_path):
    incomplete = ("--task-option", "deferred=incomplete")
    errors = four.try_to_train(tmp_path, *words("decoder", "zero3", *incomplete))

    assert all("ConfigError: Task.init leaves scale without a value" in error for error in errors)


def peaks(folder, monkeypatch, deferred, strategies):
    """MiB that rank 0 of four needs at most while weights are made, by strategy."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes back to the system
    option = ("--task-option", f"deferred={deferred}")
    given = [" ".join(words("deep", each, *option)) for each in strategies]
    output = ranks.outputs(ranks.start_ranks(folder, 4, "-c", PEAK, *given))[0]
    lines = output.splitlines()[-len(given) :]
    found = {name: int(line) / 1024 for name, line in zip(strategies, lines, strict=True)}
    sys.stdout.write("".join(f"MEASURED {name}: {peak:.1f} MiB\n" for name, peak in found.items()))
    return found


@pytest.mark.parametrize(
    "strategies", [SHARDED, pytest.param(SHARDS.keys() - SHARDED, marks=pytest.mark.nightly)]
)
def test_a_rank_needs_memory_for_its_shard_and_one_layer(strategies, tmp_path, monkeypatch):
    found = peaks(tmp_path, monkeypatch, "yes", strategies)
    assert all(SHARDS[name] < peak < SHARDS[name] + 2 * 8 for name, peak in found.items()), found


def test_without_init_a_rank_needs_memory_for_the_whole_model(tmp_path, monkeypatch):
    assert peaks(tmp_path, monkeypatch, "no", ["zero3"])["zero3"] > 190
