"""Throughput, sections of a step, memory, traces, stragglers and the progress bar."""

import json
import os
import pty
import re
import termios
import tomllib
from pathlib import Path

import pytest
import torch

from tests.trainer.ranks import PATIENCE, TRAIN, all_lines, outputs, start, start_ranks, train_alone
from trainer import models
from trainer.measure import meter
from trainer.measure.meter import find_straggler
from trainer.measure.timing import StepTimer

pytestmark = pytest.mark.torch

LAG = 0.8
"""Seconds that one rank sleeps in every step: many times what a step takes on a slow machine."""
LAGGING = f"""
import sys, time, torch, train
from pathlib import Path
from trainer.parallel import process_group
from trainer.arguments import parse

context = process_group.join()
for words in sys.argv[1:]:
    train.OUTPUT_DIR = Path(words) / "output"
    train.CHECKPOINT_DIR = Path(words) / "checkpoints"
    options = f"--strategy {{words}} --steps 4 --log-every 2 --no-tensorboard"
    context.log(words)
    run = train.Trainer(parse(options.split()), context, stop_signals=[])
    if context.rank == 1:
        run.strategy.optimizer.register_step_pre_hook(lambda *_: time.sleep({LAG}))
    run.train()
    del run
process_group.leave()
"""
PARTS = [f"{name}_seconds" for name in ("data", "forward", "backward", "optimizer")]
WAITING = [
    *("ddp", "manual", "zero1", "zero2", "zero3", "hsdp --shard-ranks 1", "tp"),
    *("pp --micro-batches 4", "pp --schedule gpipe --micro-batches 2"),
]
TOGETHER = pytest.mark.xdist_group("lagging")


@pytest.fixture(scope="module")
def lagging(tmp_path_factory):
    """The folder and the output of two ranks, rank 1 of which is slow, for each of `WAITING`."""
    folder = tmp_path_factory.mktemp("lagging")
    log = outputs(start_ranks(folder, 2, "-c", LAGGING, *WAITING))[0]
    return folder, log


def test_the_sections_of_a_step_are_timed_and_fit_into_it(tmp_path):
    train_alone(tmp_path, "--epochs", "1", "--log-every", "5", "--no-tensorboard")
    (first, *_) = [line for line in all_lines(tmp_path) if "step_seconds" in line]
    parts = [first[part] for part in PARTS]

    assert min(parts) > 0
    assert sum(parts) <= first["step_seconds"]
    assert first["images_per_second"] == pytest.approx(64 / first["step_seconds"])
    assert first["memory_bytes"] > 50e6


def test_counted_flops_fit_the_formula_for_transformers():
    """6 a parameter and byte, and attention (arXiv:2204.02311, appendix B); less the embeddings."""
    layers, width, sequence = 3, 32, 16
    tokens = torch.zeros(1, sequence, dtype=torch.long)
    counted = meter.flops_per_sample(lambda: models.gpt(layers, width, 4, sequence), tokens)
    parameters = layers * 12 * width**2 + 256 * width

    assert counted == sequence * (6 * parameters + 12 * layers * width * sequence)


@TOGETHER
@pytest.mark.parametrize("strategy", WAITING)
def test_waiting_for_a_slow_rank_counts_as_communication_only(lagging, strategy):
    last = [line for line in all_lines(lagging[0] / strategy) if "step_seconds" in line][-1]
    waited = last["communication_seconds"]

    # half of it: of the two steps that a line tells of, one waits, and a log does for the other
    assert waited > LAG / 4
    assert max(last[part] for part in PARTS) < waited
    assert waited + sum(last[part] for part in PARTS) <= last["step_seconds"]


@TOGETHER
@pytest.mark.parametrize("strategy", WAITING)
def test_the_straggler_is_named(lagging, strategy):
    log = lagging[1].partition(f"{strategy}\n")[2].partition("test accuracy")[0]

    assert re.search(r"step 4: rank 1 is slow: its own work takes \d{3,} ms per step", log)
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
def test_only_a_clearly_slower_rank_is_a_straggler(own, expected):
    assert find_straggler(own) == expected


def test_a_timer_sums_sections_until_it_is_read():
    timer = StepTimer(torch.device("cpu"))
    for _ in range(2):
        with timer("forward"):
            sum(range(1000))
    assert list(timer.timed("data", [1, 2, 3])) == [1, 2, 3]

    lap = timer.lap()
    assert set(lap) == {"forward", "data"}
    assert min(lap.values()) > 0
    assert timer.lap() == {}


@pytest.mark.xdist_group("trainer")
def test_a_trace_of_chosen_steps_is_written_for_every_rank(pools, tmp_path):
    log, _ = pools[2].train(tmp_path, "--steps", "6", "--profile", "3:4", "--no-tensorboard")

    assert "trace of steps 3 to 4 written to" in log
    for rank in range(2):
        trace = json.loads((tmp_path / "output" / "trace" / f"rank-{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"] if "name" in event]
        assert sum(name == "aten::conv2d" for name in names) == 2 * 2
        assert any(name.startswith("gloo:all_reduce") for name in names)


def test_the_progress_bar_appears_on_a_terminal(tmp_path):
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))  # tqdm hides its bar on a terminal without a size
    process = start([TRAIN, "--epochs", "1", "--no-tensorboard"], tmp_path, stdout=terminal)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(reader, 4096):
            shown += piece
    except OSError:  # EIO: the other side is closed
        pass
    assert process.wait(timeout=PATIENCE) == 0
    assert b"/17" in shown


def test_peak_flops_agree_with_those_of_advise():
    """There are two tables, because neither plane may import the other."""
    table = Path(__file__).parents[2] / "deploykit/advise/gpus.toml"
    for name, gpu in tomllib.loads(table.read_text()).items():
        if name != "cpu":
            best = max(gpu["tflops"]["bf16"], gpu["tflops"]["fp16"])
            assert meter.PEAK_FLOPS[name.partition("-")[0].upper()] == best * 1e12
