"""Channels with `stage` on two nodes of a real cluster."""

from __future__ import annotations

import dataclasses
import json

import boto3
import pytest

from deploykit.backends import slurm
from deploykit.bundle import archive as bundles
from deploykit.job.model import InputChannel, State
from tests.backends.slurm.slurm_helpers import ended, folder_of, output, wait_for
from tests.test_staging_runs import NAMES, TRAIN, shown

PLAIN = TRAIN.replace("GROUP_RANK", "NODE_RANK")
"""Without torchrun."""
pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]


def plan(made, channel):
    job = dataclasses.replace(made.job, data={"train": channel})
    assert [one for one in slurm.check(job, made.options) if one.severity == "error"] == []
    bundle = bundles.scan(made.bundle.source, 10**8)
    return slurm.plan(job, made.options, run=made.run, bundle=bundle)


def read(handle):
    return shown([line.text for line in slurm.logs(handle, follow=False)])


@pytest.fixture
def source(tmp_path):
    """A folder that every node sees."""
    for name in NAMES:
        path = tmp_path / "shared" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    return tmp_path / "shared"


@pytest.mark.parametrize("stage", ["node", "shard", "shared"])
def test_two_nodes_copy_their_data(cluster, make_plan, send, tmp_path, source, stage):
    folder = None if stage == "shared" else str(tmp_path / "$SLURMD_NODENAME")
    made = make_plan(PLAIN, nodes=2)
    handle = send(plan(made, InputChannel(str(source), stage, folder)))
    assert ended(handle).state is State.SUCCEEDED
    first, second = read(handle)
    if stage == "shard":
        assert [first["names"], second["names"]] == [sorted(NAMES)[::2], sorted(NAMES)[1::2]]
    else:
        assert first["names"] == second["names"] == sorted(NAMES)
    assert (first["folder"] == second["folder"]) == (stage == "shared")


def test_a_requeued_job_finds_its_copy(cluster, make_plan, send, tmp_path, aws):
    """From S3; the nodes of the test cluster have the environment of the one that submits."""
    client = boto3.client("s3", region_name="us-east-1")
    for name in NAMES:
        client.put_object(Bucket="my-bucket", Key=f"digits/{name}", Body=b"x" * 1000)
    waiting = PLAIN + (
        "import time\nif not int(os.environ.get('SLURM_RESTART_COUNT') or 0): time.sleep(900)\n"
    )
    channel = InputChannel("s3://my-bucket/digits", "node", str(tmp_path / "$SLURMD_NODENAME"))
    handle = send(plan(make_plan(waiting, nodes=2), channel))
    wait_for(lambda: len(read(handle)) == 2)
    output("scontrol", "requeue", handle.id)
    wait_for(lambda: len(read(handle)) == 4)
    assert ended(handle).state is State.SUCCEEDED
    assert {tuple(one["names"]) for one in read(handle)} == {tuple(sorted(NAMES))}
    said = [line.text for line in slurm.logs(handle, follow=False)]
    assert sum("reusing the complete copy in" in line for line in said) == 2
    record = folder_of("one-1", tmp_path) / "exit_records/staging-1.json"
    assert json.loads(record.read_text())["attempt"] == 1
