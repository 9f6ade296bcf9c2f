"""Runs with metrics, for tests of trackers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from deploykit.cli import main as cli
from deploykit.lib.paths import open_regular
from deploykit.observe.metrics.tensorboard import EventFile
from tests.live_run import ROOT

STAMP = "2026-11-21T01:46:08.123Z"
PYTHON = ROOT / ".venv-trackers/bin/python"
"""Has the packages of the trackers."""


def sync(capsys, *words, code=0):
    """What `deploykit sync` prints."""
    assert cli.main(["sync", *words]) == code, capsys.readouterr().err
    return capsys.readouterr()


def sent(capsys, *words):
    """How many values a `deploykit sync` to one tracker sends."""
    (one,) = json.loads(sync(capsys, *words, "--json").out)["trackers"]
    return one["values"]


def python(*words, code=0, **env):
    """What the Python prints that has the packages of the trackers."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run([PYTHON, *words], env=env, capture_output=True, text=True, check=False)
    assert code is None or done.returncode == code, done.stderr
    return done.stdout


def tracked(live, track, **job):
    """Give a live run a job that names trackers."""
    entry = {"script": "train.py", "module": None, "args": ["--lr", "0.1", "--@odd name", "x"]}
    whole = {"name": live.folder.name, "entrypoint": entry, "track": track, **job}
    (live.folder / "job.json").write_text(json.dumps(whole))
    return live


def attempt(live, number, steps):
    """A further attempt of a run in its log and in metrics.jsonl, which has more of them."""
    (live.folder / "output").mkdir(exist_ok=True)
    with (live.folder / "logs/node-0.log").open("a") as file:
        if number:
            file.write(f"{STAMP} [node 0] restart {number} (preemption)\n")
        lines = (f"{STAMP} [rank 0] step {step}/99 loss {loss(step)}\n" for step in steps[::5])
        file.writelines(lines)
    with (live.folder / "output/metrics.jsonl").open("a") as file:
        lines = ({"step": step, "loss": loss(step), "lr": 0.1} for step in steps)
        file.writelines(json.dumps(line) + "\n" for line in lines)


def loss(step):
    """What a deterministic trainer gets in every attempt."""
    return 1 / (1 + step)


def history(folder, name):
    """Steps and values of a metric in the event files of a folder, as they stand there."""
    found = []
    if not Path(folder).exists():
        return []
    for path in sorted(Path(folder).iterdir()):
        with open_regular(path) as file:
            reader = EventFile(path.name)
            found += [(one.step, one.value) for one in reader.read(file) if one.name == name]
            assert not reader.problem
    return found
