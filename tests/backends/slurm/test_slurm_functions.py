"""Python functions through submitit, on a real cluster without accounting."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
from submitit.core.utils import FailedJobError, UncompletedJobError

import deploykit
from deploykit.lib.errors import FunctionFailed, JobFileError
from deploykit.slurm import executor
from tests.backends.slurm.slurm_helpers import wait_for
from tests.strangers import as_stranger, modes, open_place, too_wide  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]


@pytest.fixture
def functions(cluster, project, tmp_path):
    return executor(overrides=["env.GREETING=hello"], folder=tmp_path / "my functions")


def test_a_function_and_its_result(functions):
    job = functions.submit(lambda x: (os.environ["GREETING"], x + 1), 41)
    assert job.result() == ("hello", 42)
    text = job.paths.submission_file.read_text()
    assert "wckey" not in text
    assert "#SBATCH --time=5\n" in text


def test_a_job_without_a_file_will_do(cluster, project):
    job = deploykit.Job(
        name="calls",
        entrypoint={"script": "train.py"},
        resources={"time_limit": "5m"},
        env={"GREETING": "hello"},
    )
    assert executor(job).submit(os.getenv, "GREETING").result() == "hello"
    with pytest.raises(JobFileError, match=r"the job: 1 problem\n  slurm\.host: is not supported"):
        executor(job, [("slurm", {"host": "login", "folder": "/shared"})])


def test_a_function_that_raises(functions):
    job = functions.submit(lambda: 1 / 0)
    with pytest.raises(FailedJobError, match="ZeroDivisionError"):
        job.result()


def test_a_job_of_two_nodes_returns_what_each_process_returned(cluster, project, tmp_path):
    both = executor(
        overrides=["resources.nodes=2", "resources.processes_per_node=2"], folder=tmp_path / "both"
    )
    job = both.submit(lambda: (os.environ["SLURM_PROCID"], os.environ["SLURM_NODEID"]))
    assert job.results() == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]
    with pytest.raises(AssertionError, match="results"):
        job.result()
    array = both.map_array(lambda x: (x, os.environ["SLURM_PROCID"]), [5, 6])
    assert [job.results() for job in array] == [[(x, str(n)) for n in range(4)] for x in (5, 6)]


def test_an_array_is_one_job(functions):
    jobs = functions.map_array(lambda a, b: a * b, [1, 2, 3], [4, 5, 6])
    assert [job.result() for job in jobs] == [4, 10, 18]
    (array,) = {job.job_id.split("_")[0] for job in jobs}
    assert array.isdigit()
    assert functions.submit(int, "7").result() == 7, "the next job is not an array"


@pytest.mark.nightly
def test_a_function_whose_process_is_killed_has_failed(functions):
    job = functions.submit(lambda: os.kill(os.getpid(), 9))
    wait_for(job.done)
    assert job.state == "FAILED"
    with pytest.raises(UncompletedJobError):
        job.result()


class Planted:
    """Loading a pickle of this object runs a command."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"id -u > {self.proof}",)


@pytest.fixture
def group_umask():
    """A common umask on clusters: members of the user's group may change new files."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.parametrize("count", [1, 2])
def test_a_pending_function_cannot_be_replaced(cluster, project, open_place, group_umask, count):  # noqa: F811
    """A member of the same group tries to replace its pickle before the job starts."""
    proof, folder = open_place / "proof", open_place / "functions"
    one = executor(overrides=["slurm.extra.hold="], folder=folder)
    jobs = one.map_array(int, ["7"] * count)
    group = jobs[0].paths.submitted_pickle.stat().st_gid
    (open_place / "planted").write_bytes(pickle.dumps(Planted(proof)))

    def attack():
        for job in jobs:
            job.paths.submitted_pickle.write_bytes((open_place / "planted").read_bytes())

    assert not as_stranger(attack, group=group)
    assert not as_stranger(lambda: list(folder.iterdir()), group=group)
    assert too_wide(modes(folder)) == {}
    subprocess.run(["scontrol", "release", jobs[0].job_id.split("_")[0]], check=True)
    assert [job.result() for job in jobs] == [7] * count
    assert not proof.exists()


def test_settings_that_functions_do_not_support(project):
    words = ["slurm.host=login1", "slurm.folder=/x", "env.KEY=secret:env:KEY"]
    words += [
        "slurm.container={image: a.sif}",
        "keep_checkpoints=3",
        "checkpoints=s3://my-bucket/a",
    ]
    channel = "{path: s3://my-bucket/train, stage: node, stage_folder: /scratch}"
    with pytest.raises(JobFileError) as caught:
        executor(overrides=[*words, f"data.train={channel}"])
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {
        *("slurm.host", "slurm.container", "env.KEY"),
        *("data.train.stage", "checkpoints", "keep_checkpoints"),
    }


# --- deploykit.launch: two nodes, each with its own launcher


def node_and_sum(number):
    """The node of this rank, and the sum over all ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() * number)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return os.environ["SLURMD_NODENAME"], int(total)


def fails_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("bad luck")


@pytest.mark.torch
def test_each_rank_returns_a_value_or_its_exception(cluster, project):
    given = {"backend": "slurm", "nodes": 2, "slurm": {"python": sys.executable}}
    values = deploykit.launch(node_and_sum, 7, processes_per_node=2, **given)
    assert sorted(values) == [0, 1, 2, 3]
    assert {total for _, total in values.values()} == {42}
    assert values[0][0] == values[1][0] != values[2][0] == values[3][0]
    with pytest.raises(FunctionFailed, match="rank 1: ValueError: bad luck") as caught:
        deploykit.launch(fails_on_rank_1, **given)
    assert isinstance(caught.value.__cause__, ValueError)
    assert [run.state.value for run in deploykit.runs(backend="slurm")] == ["failed", "succeeded"]
