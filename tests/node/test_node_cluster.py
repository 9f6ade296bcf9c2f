from __future__ import annotations

import json
import os
import subprocess

import pytest

from deploykit_node import cluster
from deploykit_node.cluster import BadEnvironment, Cluster, Rank
from tests.programs import needs

HOSTLISTS = [
    "n1",
    "n[1-3]",
    "a[01-03,7],b2",
    "g-[1-2]-[3-4]",
    "ip-10-0-1-[5,9]",
    "n[098-102]",
    "n[8-11],n[008-011]",
    "rack[1-2]n[01-02],x",
    "n3,n1,n2",
]

STEP = {
    "SLURM_JOB_ID": "4242",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NUM_TASKS": "2",
}


@needs("scontrol")
@pytest.mark.parametrize("hostlist", HOSTLISTS)
def test_hostlists_expand_as_slurm_expands_them(hostlist, tmp_path):
    conf = tmp_path / "slurm.conf"  # it must exist; no cluster is asked
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n\nPartitionName=p\n")
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", hostlist],
        env={**os.environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert cluster.expand(hostlist) == shown.split()


def test_hostlists_expand():
    assert cluster.expand("a[01-03,7],b2") == ["a01", "a02", "a03", "a7", "b2"]
    assert cluster.expand("g-[1-2]-[3-4]") == ["g-1-3", "g-1-4", "g-2-3", "g-2-4"]


def test_a_single_node_by_default():
    assert cluster.find({}) == Cluster("alone", 0, ("localhost",))
    assert cluster.find({}).peer is None


def test_the_step_counts_not_the_whole_allocation():
    found = cluster.find({**STEP, "DEPLOYKIT_BACKEND": "slurm"})
    assert found == Cluster("slurm", 1, ("n1", "n2"))
    assert found.peer == "n1"
    assert cluster.find({**STEP, "SLURM_NODEID": "0"}).peer == "n2"


def test_a_local_job_inside_an_allocation_is_alone():
    assert cluster.find({**STEP, "DEPLOYKIT_BACKEND": "local"}).launcher == "alone"


def test_emulated_nodes_are_all_here():
    env = {"DEPLOYKIT_NODE_RANK": "2", "DEPLOYKIT_NODES": "3", "DEPLOYKIT_BACKEND": "local"}
    assert cluster.find(env) == Cluster("emulated", 2, ("127.0.0.1",) * 3)


def test_sagemaker_without_a_launcher_of_its_own():
    env = {"SM_HOSTS": json.dumps(["algo-2", "algo-1"]), "SM_CURRENT_HOST": "algo-2"}
    assert cluster.find(env) == Cluster("sagemaker", 1, ("algo-1", "algo-2"))


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"DEPLOYKIT_BACKEND": "slurm"}, "planned for slurm, but SLURM_JOB_ID is not set"),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "4"},
            "4 launchers on 2 nodes instead of one",
        ),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}, "srun --ntasks-per-node=1"),
        ({"DEPLOYKIT_NODE_RANK": "0"}, "DEPLOYKIT_NODES is not set; it must be a number"),
        ({"SM_CURRENT_HOST": "a", "SM_HOSTS": "a"}, "must be a JSON list"),
        ({"SM_CURRENT_HOST": "a", "SM_HOSTS": '["b"]'}, "SM_CURRENT_HOST is a, which is not in"),
    ],
)
def test_an_incomplete_environment_is_an_error(env, text):
    with pytest.raises(BadEnvironment, match=text) as error:
        cluster.find(env)
    assert error.value.exit_code == 78


def test_ranks_are_read_from_either_launcher():
    torchrun = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert cluster.rank(torchrun) == Rank("torchrun", 5, 1, 8, 4)
    assert cluster.rank(torchrun).variables() == torchrun
    mpi = {"RANK": "5", "LOCAL_RANK": "1", "SIZE": "8", "LOCAL_SIZE": "4"}
    env = {f"OMPI_COMM_WORLD_{name}": value for name, value in mpi.items()}
    assert cluster.rank(env) == Rank("mpirun", 5, 1, 8, 4)
    assert cluster.rank(env).variables() == torchrun
    assert cluster.rank({}) is None


def test_an_incomplete_rank_is_an_error():
    with pytest.raises(BadEnvironment, match="LOCAL_RANK is not set; it must be a number"):
        cluster.rank({"RANK": "0", "WORLD_SIZE": "2"})
