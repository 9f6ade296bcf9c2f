"""The asynchronous examples, run for real: what they reach, how stale, and that they end well."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from deploykit import cli

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/asynchronous"
EPOCHS = ("--epochs", "12")

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("asynchronous")]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(script, *arguments, **variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DEPLOYKIT_", "TORCHELASTIC"))}
    return subprocess.Popen(
        [sys.executable, EXAMPLES / script, *EPOCHS, *arguments],
        env=kept | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(processes):
    """What each printed; all of them must end with 0."""
    try:
        texts = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), texts
    return texts


def ranks(world, script, *arguments):
    """Run `script` on so many ranks, with torchrun's variables; what rank 0 printed."""
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = [start(script, *arguments, RANK=str(rank), **place) for rank in range(world)]
    first, *others = ended(started)
    assert others == [""] * (world - 1)
    return first


def found(text):
    """Accuracy, loss, and staleness: mean, max, number of gradients."""
    said = re.search(r"test accuracy ([\d.]+), loss ([\d.]+), \d+ samples/s", text)
    stale = re.search(r"staleness mean ([\d.]+), max (\d+) of (\d+) gradients", text)
    assert said, text
    assert stale, text
    return SimpleNamespace(
        accuracy=float(said[1]),
        loss=float(said[2]),
        mean=float(stale[1]),
        max=int(stale[2]),
        gradients=int(stale[3]),
    )


def module(name, monkeypatch):
    """One of the files, imported under a name of its own."""
    monkeypatch.syspath_prepend(EXAMPLES)
    spec = importlib.util.spec_from_file_location(f"_{name}", EXAMPLES / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_synchronous_all_three_are_the_same_training():
    """Nothing is stale, and two gradients summed are two gradients summed, whoever sums them."""
    server = found(ranks(3, "parameter_server.py", "--synchronous"))
    pipeline = found(ranks(2, "weight_stashing.py", "--synchronous"))
    text = ended([start("hogwild.py", "--synchronous")])[0]
    hogwild = found(text)
    assert "updates lost 0.0000%" in text
    assert (server.max, pipeline.max, hogwild.max) == (0, 0, 0)
    assert server.accuracy > 0.9
    assert server.gradients == hogwild.gradients == pipeline.gradients / 2 == 12 * 33
    assert [pipeline.loss, hogwild.loss] == pytest.approx([server.loss] * 2, abs=1e-5)


def test_a_parameter_server_waits_for_nobody():
    run = found(ranks(3, "parameter_server.py", "--straggler", "0.03"))
    assert run.accuracy > 0.85
    assert run.mean > 0
    assert run.max > 2  # what the bound below forbids
    assert run.gradients == 12 * 33


def test_bounded_staleness_is_a_bound():
    arguments = ("--straggler", "0.01", "--max-staleness", "2")
    run = found(ranks(3, "parameter_server.py", *arguments))
    assert run.accuracy > 0.9
    assert run.max == 2


def test_hogwild_is_stale_and_learns():
    run = found(ended([start("hogwild.py")])[0])
    assert run.accuracy > 0.85
    assert run.mean > 0
    assert run.gradients == 12 * 33


def test_a_pipeline_that_never_drains():
    """Three stages: 2, 1 and 0 updates between forward and backward, and as many stashes more."""
    text = ranks(3, "weight_stashing.py")
    run = found(text)
    assert run.accuracy > 0.9
    rows = re.findall(r"^ +(\d) +(\d+) +([\d.]+) +(\d+) +(\d+) +(\d+)$", text, re.MULTILINE)
    assert [tuple(map(float, row)) for row in rows] == [
        (0, 396, pytest.approx(2, abs=0.02), 2, 3, 0),
        (1, 396, pytest.approx(1, abs=0.02), 1, 2, 0),
        (2, 396, 0, 0, 1, 0),
    ]


def test_without_a_stash_the_backward_meets_other_weights():
    text = ranks(2, "weight_stashing.py", "--no-stash")
    rows = re.findall(r"^ +\d .* (\d+)$", text, re.MULTILINE)
    assert rows == ["395", "0"]  # all but the first, whose backward comes before any update


@pytest.fixture
def stage(monkeypatch):
    """The last and only stage of a pipeline, in this process."""
    stashing = module("weight_stashing", monkeypatch)
    options = SimpleNamespace(batch_size=32, lr=0.1, seed=0, no_stash=False, synchronous=False)
    return stashing.Stage(options, 0, 1)


def test_a_stashed_backward_gives_the_gradient_at_the_weights_of_the_forward(stage):
    before = [weight.detach().clone().requires_grad_() for weight in stage.blocks.parameters()]
    stage.forward(0)
    stage.forward(1)
    stage.backward(0)
    stage.update()
    stage.backward(1)
    images, labels = chosen(stage, 1)
    names = [name for name, _ in stage.blocks.named_parameters()]
    outputs = torch.func.functional_call(
        stage.blocks, dict(zip(names, before, strict=True)), images
    )
    expected = torch.autograd.grad(cross_entropy(outputs, labels), before)
    now = torch.autograd.grad(
        cross_entropy(stage.blocks(images), labels), list(stage.blocks.parameters())
    )
    for weight, right, wrong in zip(stage.blocks.parameters(), expected, now, strict=True):
        assert torch.allclose(weight.grad, right, atol=1e-7)
        assert not torch.allclose(weight.grad, wrong, atol=1e-4)
    stage.update()
    assert stage.staleness == Counter({0: 1, 1: 1})


def chosen(stage, step):
    indices = sys.modules["digits"].batch(stage.options, step)
    return stage.pixels[indices], stage.labels[indices]


def test_a_changed_stash_is_noticed(stage):
    stage.forward(0)
    weight = next(iter(stage.flying[0].weights.values()))
    weight.data[0, 0] += 1e-3
    with pytest.raises(AssertionError, match="stage 0, batch 0: not the forward's weights"):
        stage.backward(0)


def test_the_images_are_those_of_the_main_trainer(monkeypatch):
    digits = module("digits", monkeypatch)
    monkeypatch.syspath_prepend(ROOT / "entrypoints")
    from trainer import tasks

    task = tasks.digits(None)
    for part in ("training", "test"):
        pixels, labels = digits.images(part)
        images, theirs = getattr(task, part).tensors
        assert torch.equal(labels, theirs)
        assert torch.equal(pixels, images.flatten(1))


@pytest.mark.parametrize("script", ["parameter_server.py", "weight_stashing.py"])
def test_one_process_is_refused_with_the_command_to_use(script):
    process = start(script)
    assert "torchrun --nproc-per-node=" in process.communicate(timeout=60)[0]
    assert process.returncode == 1


def test_the_job_file_runs(capsys):
    argv = ["submit", str(EXAMPLES / "job.yaml"), "--backend", "local", "--wait"]
    assert cli.main([*argv, "--set", "entrypoint.args=[--epochs, 4]"]) == 0
    shown = capsys.readouterr().out
    assert "[rank 0] parameter server, asynchronous: test accuracy" in shown
    assert "succeeded, exit code 0" in shown
