"""Checkpoints in a bucket on a real cluster, from disks of the nodes that no other node sees."""

from __future__ import annotations

import dataclasses

import boto3
import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import Options
from deploykit.bundle import archive as bundles
from deploykit.cli import main as cli
from deploykit.job.model import State
from tests.backends.slurm.slurm_helpers import ended, folder_of, output, wait_for

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.aws,
    pytest.mark.xdist_group("slurm"),
]

SHARDS = """\
import os, pathlib, time
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

os.environ |= {"RANK": os.environ["NODE_RANK"], "WORLD_SIZE": os.environ["NNODES"]}
dist.init_process_group("gloo")
rank = dist.get_rank()
folder = pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
saved = sorted(path.name for path in folder.glob("step-*"))
state = {f"rank-{one}": torch.zeros(10_000) for one in range(2)}
if saved:
    dcp.load(state, checkpoint_id=folder / saved[-1])
values = [int(state[name][0]) for name in sorted(state)]
print("node", os.environ["SLURMD_NODENAME"], "starts with", values, "of", saved, flush=True)
dist.barrier()
if not saved:
    for step in (1, 2, 3):
        mine = {f"rank-{rank}": torch.full((10_000,), step * 10.0 + rank)}
        dcp.save(mine, checkpoint_id=folder / f"step-{step}")
    print("saved", sorted(path.name for path in (folder / "step-3").iterdir()), flush=True)
    time.sleep(900)
dist.destroy_process_group()
"""
"""Each rank writes its own tensor, and reads those of all."""


def lines(handle):
    return [line.text for line in slurm.logs(handle, follow=False)]


def with_bucket(plan, **options):
    """The plan of the same job with its checkpoints in a bucket."""
    job = dataclasses.replace(plan.job, checkpoints="s3://my-bucket/runs")
    chosen = Options(**options)
    assert list(slurm.check(job, chosen)) == []
    bundle = bundles.scan(plan.bundle.source, 10**8)
    return slurm.plan(job, chosen, run=plan.run, bundle=bundle)


def manifests(step):
    prefix = f"runs/.deploykit/checkpoints/{step}/"
    listed = boto3.client("s3").list_objects_v2(Bucket="my-bucket", Prefix=prefix)
    return [each["Key"].removeprefix(prefix) for each in listed.get("Contents", ())]


def test_a_job_resumes_on_other_nodes_from_what_each_node_had_on_its_own_disk(
    cluster, aws, make_plan, send, tmp_path
):
    disks = f"{tmp_path}/disks/$SLURMD_NODENAME"
    plan = with_bucket(make_plan(SHARDS, nodes=2), checkpoint_folder=disks)
    handle = send(plan)
    wait_for(
        lambda: sum(line.startswith("saved") for line in lines(handle)) == 2,
        what=lambda: lines(handle),
    )
    assert "saved ['__1_0.distcp']" in lines(handle)
    wait_for(lambda: len(manifests("step-3")) == 2, what=lambda: lines(handle))
    first = output("squeue", "--noheader", "--format=%N", f"--job={handle.id}").strip()
    nodes = output("scontrol", "show", "hostnames", first).split()
    names = ",".join(nodes)
    output("scontrol", "update", f"NodeName={names}", "State=DRAIN", "Reason=test")
    try:
        output("scontrol", "requeue", handle.id)
        status = ended(handle)
    finally:
        wait_for(lambda: not output("squeue", "--noheader", f"--nodelist={names}"))
        output("scontrol", "update", f"NodeName={names}", "State=RESUME")
    said = lines(handle)
    assert status.state is State.SUCCEEDED, said
    resumed = [line for line in said if "starts with [30, 31] of ['step-3']" in line]
    assert len(resumed) == 2, said
    assert not any(f"node {name} " in line for name in nodes for line in resumed)
    assert sum("restored step-3" in line for line in said) == 2


SHARED = """\
import os, pathlib, time
folder = pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
print("found", sorted(path.name for path in folder.glob("[!.]*")), flush=True)
if os.environ["NODE_RANK"] == "0":
    (folder / "epoch_1.pt").write_bytes(b"weights" * 1000)
"""


def test_on_a_shared_folder_the_first_node_copies_for_all(cluster, aws, make_plan, send, tmp_path):
    def ran(run):
        handle = send(with_bucket(make_plan(SHARED, nodes=2, run=run)))
        assert ended(handle).state is State.SUCCEEDED, lines(handle)
        return lines(handle)

    ran("one-1")
    assert manifests("files-1") == ["node-0-of-1.json"]
    said = ran("one-2")
    assert said.count("found ['epoch_1.pt']") == 2, said
    assert (folder_of("one-2", tmp_path) / "checkpoints/epoch_1.pt").exists()


OF_A_TASK = """\
import os, pathlib
folder = pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
print("found", [path.read_text() for path in folder.glob("*.pt")])
(folder / "epoch_1.pt").write_text("of task " + os.environ["SLURM_ARRAY_TASK_ID"])
"""


def test_each_task_of_an_array_has_a_prefix_of_its_own(cluster, aws, project, tmp_path, capsys):
    """Two tasks write the same names, and each finds its own again in a later array."""
    (project / "train.py").write_text(OF_A_TASK)
    sets = ["checkpoints=s3://my-bucket/trials", "slurm.array=2", "entrypoint.launcher=python"]
    words = [word for one in sets for word in ("--set", one)]
    for run in ("first", "second"):
        code = cli.main(["submit", "-b", "slurm", "--run", run, "--wait", *words])
        assert code == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "[task 0] [rank 0] found ['of task 0']" in said
    assert "[task 1] [rank 0] found ['of task 1']" in said
    target = tmp_path / "fetched"
    assert cli.main(["fetch", "second", "--checkpoints", "--to", str(target)]) == 0
    texts = [(target / f"checkpoints/{task}/epoch_1.pt").read_text() for task in (0, 1)]
    assert texts == ["of task 0", "of task 1"]
