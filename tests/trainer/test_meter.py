"""Speed, the parts of a step, memory, traces, and the rank that lags."""

import json
import os
import pty
import tomllib
from pathlib import Path

import pytest
import torch
from ranks import TRAIN, all_lines, outputs, start, start_ranks, train_alone
from torch.utils.data import TensorDataset

from trainer import models, speed
from trainer.timing import Clock, slow_rank

pytestmark = pytest.mark.torch

LAGGING = """
import time, torch, train
from trainer import group
from trainer.options import parse

run = train.Run(parse(["--epochs", "1", "--log-every", "4"]), group.join(), notices=[])
if run.place.rank == 1:
    run.strategy.model.register_forward_pre_hook(lambda *_: time.sleep(0.1))
run.train()
del run
group.leave()
"""


def test_each_part_of_a_step_is_timed_and_they_fit_into_it(tmp_path):
    train_alone(tmp_path, "--epochs", "1", "--log-every", "5", "--no-tensorboard")
    (first, *_) = [line for line in all_lines(tmp_path) if "step_seconds" in line]
    parts = [first[f"{name}_seconds"] for name in ("data", "forward", "backward", "optimizer")]

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


def test_the_rank_that_lags_is_named(tmp_path):
    said = outputs(start_ranks(tmp_path, 2, "-c", LAGGING))[0]

    assert "step 8: rank 1 is slow: its own work takes 1" in said
    assert "rank 0 is slow" not in said


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
    assert process.wait(timeout=60) == 0
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
