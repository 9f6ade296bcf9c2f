"""examples/streaming, run for real over S3: after a kill, each rank goes on with its next batch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/streaming"
VENV = ROOT / ".venv-streaming"
SAMPLES, RANKS, BATCH, EPOCHS, SAVE_EVERY = 2048, 2, 32, 2, 5
STEPS = SAMPLES // RANKS // BATCH * EPOCHS
DATA = "s3://my-bucket/images"

pytestmark = [
    pytest.mark.torch,
    pytest.mark.aws,
    pytest.mark.skipif(not VENV.exists(), reason="needs make .venv-streaming/.ready"),
]


@pytest.fixture
def shards(aws, monkeypatch, tmp_path):
    """The shards, in the bucket of this test's server."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where LitData keeps what it has read
    command = [VENV / "bin/python", "-W", "ignore", EXAMPLE / "shards.py", DATA]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return aws


def submitted(script, folder):
    """The process of a submit that waits, with its results in `folder`."""
    folder.mkdir()
    changes = {
        "entrypoint.script": script,
        "environment.venv": VENV,
        "output": folder,
        "checkpoints": folder,
    }
    command = [sys.executable, "-m", "deploykit", "submit", EXAMPLE / "job.yaml", "--backend"]
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    arguments = ["--epochs", str(EPOCHS), "--save-every", str(SAVE_EVERY)]
    return subprocess.Popen(
        [*command, "local", "--wait", *words, "--", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def recorded(folder, rank):
    """The samples of each step, in the order in which the rank used them."""
    path = folder / f"samples-{rank}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), numbers) for step, *numbers in map(str.split, lines)]


def kill_rank(rank, script, folder):
    """SIGKILL for the rank and the workers of its loader."""
    marks = (f"\0RANK={rank}\0".encode(), f"={folder}\0".encode())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = b"\0" + (process / "environ").read_bytes()
            ours = script.encode() in (process / "cmdline").read_bytes()
            if ours and all(mark in environment for mark in marks):
                os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.parametrize(
    "script", ["with_litdata.py", pytest.param("with_webdataset.py", marks=pytest.mark.nightly)]
)
def test_the_samples_after_a_kill_are_those_that_would_have_come(shards, tmp_path, script):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    alone = submitted(script, whole)
    shown, _ = alone.communicate()
    assert alone.returncode == 0, shown
    expected = [dict(recorded(whole, rank)) for rank in range(RANKS)]
    assert [list(steps) for steps in expected] == [list(range(1, STEPS + 1))] * RANKS
    for first in range(0, STEPS, STEPS // EPOCHS):  # all samples, each once
        epoch = [expected[rank][first + 1 + at] for rank in range(RANKS) for at in range(32)]
        assert sorted(int(one) for batch in epoch for one in batch) == list(range(SAMPLES))

    run = submitted(script, killed)
    while len(recorded(killed, 1)) < 2 * SAVE_EVERY + 2:
        assert run.poll() is None, run.stdout.read()
        time.sleep(0.02)
    kill_rank(1, script, killed)
    shown, _ = run.communicate()
    assert run.returncode == 0, shown
    for rank in range(RANKS):
        steps = recorded(killed, rank)
        assert len(steps) > STEPS, "the rank was not killed in time"
        assert {step for step, _ in steps} == set(range(1, STEPS + 1))
        for step, numbers in steps:
            assert numbers == expected[rank][step], f"rank {rank}, step {step}"
        resumed = [after for (before, _), (after, _) in pairwise(steps) if after != before + 1]
        assert [step % SAVE_EVERY for step in resumed] == [1], "after a snapshot, once"
        assert resumed[0] > SAVE_EVERY, "not from the start"
