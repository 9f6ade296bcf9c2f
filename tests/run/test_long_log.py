"""A long log is read in little memory: by `metrics`, `report`, `watch` and `sync`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_LINES = 40_000
_MOST = 24 << 20
"""Bytes above what the same verb takes for a short log: the log and its values take 60 MiB."""
_VERBS = (
    pytest.param(["metrics"], id="metrics"),
    pytest.param(["metrics", "--csv"], id="metrics --csv", marks=pytest.mark.nightly),
    *(
        pytest.param(argv, id=" ".join(argv[:2]), marks=pytest.mark.slow)
        for argv in (
            ["report", "--output", "page.html"],
            ["watch", "--once"],
            ["sync"],
        )
    ),
)


@pytest.fixture(scope="module")
def logged():
    """Lines of a training, and of a program that prints much else."""
    lines = []
    for step in range(_LINES):
        text = f"step {step} loss={1 / (step + 1):.6f} lr=0.001 grad_norm={step % 7}.5"
        lines.append(f"2026-11-21T01:{step // 1000:02}:00.123Z [rank 0] {text}\n")
    return "".join(lines)


def peak(argv, folder):
    """The peak of the memory of a verb, in bytes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deploykit", *argv],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, process.stderr.read()
    process.stderr.close()
    process.returncode = 0
    return usage.ru_maxrss << 10


@pytest.mark.parametrize("argv", _VERBS)
@pytest.mark.slow
def test_the_memory_of_a_verb_does_not_grow_with_the_log(argv, start, logged, tmp_path):
    for name, text in (("short", logged[:1000]), ("long", logged)):
        one = start(name)
        (one.folder / "logs/node-0.log").write_text(text)
        job = {"name": name, "track": {"tensorboard": str(tmp_path / "board")}}
        (one.folder / "job.json").write_text(json.dumps(job))
        one.end()
    verb, *options = argv
    short = peak([verb, "short", *options], tmp_path)
    (tmp_path / "page.html").unlink(missing_ok=True)
    assert peak([verb, "long", *options], tmp_path) < short + _MOST
