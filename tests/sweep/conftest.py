"""A job without torch for sweeps, on the backend of plain.py; and the command in this process."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest

from deploykit.cli import main as cli

SCRIPT = """\
import os, sys, time
from pathlib import Path
with open("../starts", "a") as file: file.write("x\\n")
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
args |= {"--env": os.environ.get("FROM_ENV", "")}
Path("../args").write_text(repr(sys.argv[1:]))
lr = float(args.get("--lr", 0))
for step in range(1, 4):
    print(f"step {step}/3 loss={(lr - 0.03) ** 2 + 1 / step:.9f} top={lr * step}", flush=True)
exec(args.get("--do", ""))
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """What pip would leave behind of a package that offers the backend, for child processes too."""
    folder = tmp_path / "site"
    info = folder / "plain-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deploykit.backends]\nplain = tests.sweep.plain\n")
    root = str(Path(__file__).parents[2])
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), root]))
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "plain")
    return folder


@pytest.fixture
def toy(site, tmp_path, monkeypatch):
    """A folder with a job whose loss is least at lr = 0.03."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.yaml").write_text("name: toy\nentrypoint: {script: train.py}\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def sweep(capsys):
    """Run `deploykit sweep` here: what it prints, as data where that is JSON."""

    def run(*words, code=0):
        capsys.readouterr()
        assert cli.main(["sweep", *words]) == code, capsys.readouterr()
        run.notes = (shown := capsys.readouterr()).err
        return json.loads(shown.out) if "--json" in words else shown.out

    return run


@pytest.fixture
def write(toy):
    """Write sweep.yaml; keys that are not given are those of a short random search."""

    def file(text="", **keys):
        parameters = keys.pop("parameters", "{lr: {range: [0.01, 0.05]}}")
        known = {"trials": 3, "sampler": "random", "objective": "{metric: loss}"} | keys
        lines = [f"parameters: {parameters}", *(f"{key}: {one}" for key, one in known.items())]
        Path(toy, "sweep.yaml").write_text("\n".join([*lines, textwrap.dedent(text), ""]))

    return file
