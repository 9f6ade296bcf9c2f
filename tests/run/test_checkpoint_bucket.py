"""`checkpoints: s3://...` on this machine: copied during a run, and where the next starts."""

from __future__ import annotations

import json
import textwrap

import boto3
import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths

pytestmark = [pytest.mark.aws, pytest.mark.torch, pytest.mark.timeout(900)]

PREFIX = "s3://my-bucket/digits"
FOREIGN = """\
import os, pathlib, sys, time
import torch

folder = pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
saved = sorted(folder.glob("epoch_*.pt"))
start = torch.load(saved[-1])["epoch"] + 1 if saved else 0
print("starts at epoch", start, "with", sorted(path.name for path in folder.glob("[!.]*")))
for epoch in range(start, int(sys.argv[-1])):
    weights = torch.full((1000,), float(epoch))
    torch.save({"epoch": epoch, "weights": weights}, folder / f"epoch_{epoch:02d}.pt")
    torch.save(weights, folder / "last.pt")
"""
"""A script that knows nothing of deploykit but the folder."""


@pytest.fixture
def foreign(aws, project):
    """A project whose script saves a file for each epoch, and one again and again."""
    (project / "train.py").write_text(FOREIGN)
    (project / "job.yaml").write_text(
        textwrap.dedent(
            f"""\
            name: foreign
            entrypoint: {{script: train.py, args: ["3"]}}
            checkpoints: {PREFIX}
            """
        )
    )
    return project


def deploykit(capsys, *words, code=0):
    """Run a verb; what it printed, and what it noted."""
    capsys.readouterr()
    assert cli.main([str(word) for word in words]) == code, capsys.readouterr()
    return capsys.readouterr()


def trained(capsys, run, *words, code=0):
    """Submit a run and wait for it; the lines of its log."""
    deploykit(capsys, "submit", "--backend", "local", "--run", run, *words)
    deploykit(capsys, "wait", run, code=code)
    return deploykit(capsys, "logs", run).out


def keys():
    listed = boto3.client("s3").list_objects_v2(Bucket="my-bucket").get("Contents", ())
    return {each["Key"] for each in listed}


def test_another_run_resumes_from_the_newest_checkpoint_in_the_bucket(foreign, capsys):
    assert "starts at epoch 0 with []" in trained(capsys, "first")
    data = {f"digits/epoch_{epoch:02d}.pt" for epoch in range(3)} | {"digits/last.pt"}
    assert {key for key in keys() if "/.deploykit/" not in key} == data
    log = trained(capsys, "second", "--", "4")
    assert "starts at epoch 3 with ['epoch_02.pt', 'last.pt']" in log
    shown = deploykit(capsys, "status", "second").out
    assert "pt in s3://my-bucket/digits\n" in shown
    data = json.loads(deploykit(capsys, "status", "second", "--json").out)
    assert data[0]["checkpoints"]["error"] == ""
    saved = paths.run_folder("second") / "checkpoints"
    assert (saved / "epoch_03.pt").exists()
