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
import json, os, pathlib, sys

folder = pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
saved = sorted(folder.glob("epoch_*.pt"))
start = json.loads(saved[-1].read_text())["epoch"] + 1 if saved else 0
print("starts at epoch", start, "with", sorted(path.name for path in folder.glob("[!.]*")))
for epoch in range(start, int(sys.argv[-1])):
    text = json.dumps({"epoch": epoch, "weights": [epoch] * 1000})
    for name in (f"epoch_{epoch:02d}.pt", "last.pt"):
        (folder / name).write_text(text)
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
            entrypoint: {{script: train.py, args: ["3"], launcher: python}}
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


def test_checkpoints_come_back_from_the_bucket_and_stay_there(foreign, tmp_path, capsys):
    trained(capsys, "first")
    shown = deploykit(capsys, "fetch", "first", "--checkpoints", "--dry-run")
    assert "would copy 4 files" in shown.out
    target = tmp_path / "fetched"
    deploykit(capsys, "fetch", "first", "--checkpoints", "-p", "epoch_0[12].pt", "--to", target)
    fetched = sorted(path.name for path in (target / "checkpoints").glob("[!.]*"))
    assert fetched == ["epoch_01.pt", "epoch_02.pt"]
    again = deploykit(capsys, "fetch", "first", "--checkpoints", "--to", target).out
    assert "copied 2 files" in again
    assert "2 unchanged files skipped" in again
    removed = deploykit(capsys, "rm", "first", "--remote", "--yes").out
    assert f"left    {PREFIX}: set in the job file, so other runs may use it" in removed
    assert "digits/last.pt" in keys()


def test_our_trainer_resumes_on_another_machine(aws, project, capsys):
    """As there, the second run has nothing but the bucket."""
    source = paths.shipped("entrypoints")
    (project / "job.yaml").write_text(
        textwrap.dedent(
            f"""\
            name: digits
            source: {source}
            entrypoint: {{script: train.py, args: [--checkpoint-steps, "5", --no-tensorboard]}}
            resources: {{processes_per_node: 2}}
            checkpoints: {PREFIX}
            keep_checkpoints: 1
            """
        )
    )
    trained(capsys, "first", "--", "--steps", "10")
    assert "digits/step-00000010/whole.json" in keys()
    assert not any("/step-00000005/" in key for key in keys())
    log = trained(capsys, "second", "--", "--steps", "12")
    assert "restored step-00000010" in log
    assert "step-00000010 after 10 steps" in log
    assert "digits/step-00000012/whole.json" in keys()


def test_check_and_the_plan_name_the_bucket(foreign, capsys, tmp_path):
    assert (
        f"DEPLOYKIT_CHECKPOINT_BUCKET={PREFIX}"
        in deploykit(capsys, "submit", "--dry-run", "--backend", "local").out
    )
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/usr/bin/env")
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    words = ["check", "--backend", "local", "--set", f"local.python={python}"]
    refused = deploykit(capsys, *words, code=65).err
    assert "checkpoints: boto3 is not installed for" in refused
