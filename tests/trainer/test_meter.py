"""Speed, the parts of a step, memory, traces, and the rank that lags."""

import json
import os
import pty
import re
import tomllib
from pathlib import Path

import pytest
import torch
from ranks import PATIENCE, TRAIN, all_lines, outputs, start, start_ranks, train_alone
from torch.utils.data import TensorDataset

from trainer import models, speed
from trainer.timing import Clock, slow_rank

pytestmark = pytest.mark.torch

LAG = 0.8
"""Seconds that one rank sleeps in every step: many times what a step takes on a slow machine."""
LAGGING = f"""
import sys, time, torch, train
from pathlib import Path
from trainer import group
from trainer.options import parse

place = group.join()
for words in sys.argv[1:]:
    train.OUTPUT = Path(words) / "output"
    train.CHECKPOINTS = Path(words) / "checkpoints"
    options = f"--strategy {{words}} --steps 4 --log-every 2 --no-tensorboard"
    place.say(words)
    run = train.Run(parse(options.split()), place, notices=[])
    if place.rank == 1:
        run.strategy.optimizer.register_step_pre_hook(lambda *_: time.sleep({LAG}))
    run.train()
    del run
group.leave()
"""
PARTS = [f"{name}_seconds" for name in ("data", "forward", "backward", "optimizer")]
WAITING = [
    *("ddp", "manual", "zero1", "zero2", "zero3", "hsdp --shard-ranks 1", "tp"),
    *("pp --micro-batches 4", "pp --schedule gpipe --micro-batches 2"),
]
TOGETHER = pytest.mark.xdist_group("lagging")


@pytest.fixture(scope="module")
def lagging(tmp_path_factory):
    """What two ranks, of which rank 1 is slow, print and log with each of `WAITING`."""
    folder = tmp_path_factory.mktemp("lagging")
    said = outputs(start_ranks(folder, 2, "-c", LAGGING, *WAITING))[0]
    return folder, said


def test_each_part_of_a_step_is_timed_and_they_fit_into_it(tmp_path):
    train_alone(tmp_path, "--epochs", "1", "--log-every", "5", "--no-tensorboard")
    (first, *_) = [line for line in all_lines(tmp_path) if "step_seconds" in line]
    parts = [first[part] for part in PARTS]

    assert min(parts) > 0
    assert sum(parts) <= first["step_seconds"]
    assert first["images_per_second"] == pytest.approx(64 / first["step_seconds"])
    assert first["memory_bytes"] > 50e6


def test_operations_are_counted_by_torch_and_fit_the_formula_for_transformers():
    """6 a parameter and byte, and attention (arXiv:2204.02311, appendix B); less the embeddings."""
    layers, width, sequence = 3, 32, 16
    tokens = TensorDataset(torch.zeros(1, sequence, dtype=torch.long))
    counted = speed.operations(lambda: models.gpt(layers, width, 4, sequence), tokens)
    parameters = layers * 12 * width**2 + 256 * width

    assert counted == sequence * (6 * parameters + 12 * layers * width * sequence)


@TOGETHER
@pytest.mark.parametrize("strategy", WAITING)
def test_waiting_for_a_slow_rank_is_communication_and_no_other_part(lagging, strategy):
    last = [line for line in all_lines(lagging[0] / strategy) if "step_seconds" in line][-1]
    waited = last["communication_seconds"]

    # half of it: of the two steps that a line tells of, one waits, and a log does for the other
    assert waited > LAG / 4
    assert max(last[part] for part in PARTS) < LAG / 4
    assert waited + sum(last[part] for part in PARTS) <= last["step_seconds"]


@TOGETHER
@pytest.mark.parametrize("strategy", WAITING)
def test_the_rank_that_lags_is_named(lagging, strategy):
    said = lagging[1].partition(f"{strategy}\n")[2].partition("test accuracy")[0]

    assert re.search(r"step 4: rank 1 is slow: its own work takes \d{3,} ms", said)
    assert "rank 0 is slow" not in lagging[1]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([0.1, 0.1, 0.1, 0.1], None),
        ([0.1, 0.1, 0.14, 0.1], None),
        ([0.1, 0.1, 0.2, 0.1], (2, 2.0)),
        ([0.001, 0.003], None),
        ([0.1], None),
    ],
)
def test_only_a_clear_lag_counts(own, expected):
    assert slow_rank(own) == expected


def test_a_clock_adds_up_and_starts_anew():
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        with clock("forward"):
            sum(range(1000))
    assert list(clock.timed("data", [1, 2, 3])) == [1, 2, 3]

    lap = clock.lap()
    assert set(lap) == {"forward", "data"}
    assert min(lap.values()) > 0
    assert clock.lap() == {}


def test_a_trace_of_chosen_steps_is_written_for_every_rank(tmp_path):
    options = ("--steps", "6", "--profile", "3:4", "--no-tensorboard")
    said = outputs(start_ranks(tmp_path, 2, TRAIN, *options))[0]

    assert "steps 3 to 4 traced in" in said
    for rank in range(2):
        trace = json.loads((tmp_path / "output" / "trace" / f"rank-{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"] if "name" in event]
        assert sum(name == "aten::conv2d" for name in names) == 2 * 2
        assert any(name.startswith("gloo:all_reduce") for name in names)


def test_progress_is_drawn_on_a_terminal_only(tmp_path):
    reader, terminal = pty.openpty()
    process = start([TRAIN, "--epochs", "1", "--no-tensorboard"], tmp_path, stdout=terminal)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(reader, 4096):
            shown += piece
    except OSError:  # Linux says that the other side is closed
        pass
    assert process.wait(timeout=PATIENCE) == 0
    assert b"/17" in shown

    piped = outputs([start([TRAIN, "--epochs", "1", "--no-tensorboard"], tmp_path / "piped")])[0]
    assert "/17" not in piped
    assert "\r" not in piped


def test_the_peaks_are_those_that_the_chooser_knows():
    """Each plane keeps them: one is not installed where the other runs."""
    table = Path(__file__).parents[2] / "deploykit/advise/gpus.toml"
    for name, gpu in tomllib.loads(table.read_text()).items():
        if name != "cpu":
            best = max(gpu["tflops"]["bf16"], gpu["tflops"]["fp16"])
            assert speed.PEAKS[name.partition("-")[0].upper()] == best * 1e12
