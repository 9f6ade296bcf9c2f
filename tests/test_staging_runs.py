"""Channels with `stage` in whole runs: on this machine, and on two nodes of a real cluster."""

from __future__ import annotations

import json
import threading

import boto3
import pytest

from deploykit.cli import main as cli
from deploykit.observe import exit_records
from tests.backends.slurm.slurm_helpers import folder_of, wait_for

pytestmark = pytest.mark.torch

TRAIN = """\
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["DEPLOYKIT_DATA_TRAIN"])
names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.bin"))
shown = {"node": int(os.environ["GROUP_RANK"]), "folder": str(folder), "names": names}
print("read", json.dumps(shown), flush=True)
"""
NAMES = [f"part {number % 2}/{number}.bin" for number in range(6)]


@pytest.fixture
def bucket(aws):
    client = boto3.client("s3", region_name="us-east-1")
    for name in NAMES:
        client.put_object(Bucket="my-bucket", Key=f"digits/{name}", Body=b"x" * 1000)
    return client


def shown(lines):
    """What each node's rank has read, by node."""
    found = [json.loads(line.partition("read ")[2]) for line in lines if "read {" in line]
    return sorted(found, key=lambda one: one["node"])


@pytest.fixture
def local_job(project, tmp_path, monkeypatch):
    """A function that submits a job with these keys of its channel and waits for its end."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (project / "train.py").write_text(TRAIN)

    def submit(path, stage, *more):
        channel = json.dumps({"path": path, "stage": stage, "stage_folder": str(disk)})
        return cli.main(["submit", "-b", "local", "--set", f"data.train={channel}", *more])

    return submit


def test_two_emulated_nodes_share_a_prefix_of_s3(local_job, bucket, capsys, tmp_path):
    assert local_job("s3://my-bucket/digits", "shard", "--nodes", "2", "--wait") == 0
    first, second = shown(capsys.readouterr().out.splitlines())
    assert first["names"] == sorted(NAMES)[::2]
    assert second["names"] == sorted(NAMES)[1::2]
    assert first["folder"].startswith(str(tmp_path / "disk"))


def test_a_run_without_its_data_ends_before_the_program_and_says_why(local_job, bucket, capsys):
    assert local_job("s3://my-bucket/digit", "node", "--wait", "--run", "typo") == 78
    shown = capsys.readouterr()
    assert "data.train: there are no files in s3://my-bucket/digit." in shown.out + shown.err
    assert "read {" not in shown.out
    assert cli.main(["diagnose", "typo"]) == 79
    assert "could not be copied to the node" in capsys.readouterr().out


def test_status_shows_how_far_the_copy_is(local_job, bucket, aws, capsys, tmp_path):
    """The server answers for the last file only when it is told to."""
    held = threading.Event()

    def respond(one, forward):
        if one.path.endswith("5.bin"):
            held.wait()
        return forward()

    aws.respond = respond
    try:
        assert local_job("s3://my-bucket/digits", "node", "--run", "slow") == 0
        folder = folder_of("slow", tmp_path)
        wait_for(lambda: exit_records.staging(folder))
        capsys.readouterr()
        assert cli.main(["status", "slow"]) == 0
        assert "staging train: " in capsys.readouterr().out
        (record,) = (one for _, one in exit_records.numbered(folder, "staging"))
        assert record["size"] == 6000
    finally:
        held.set()
    assert cli.main(["wait", "slow"]) == 0
    capsys.readouterr()
    assert cli.main(["status", "slow"]) == 0
    assert "staging" not in capsys.readouterr().out
