"""A node that restarts, and is back before Slurm takes it for lost."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.backends.slurm import survival_runs as runs
from tests.backends.slurm.slurm_helpers import output, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]
pytestmark += [pytest.mark.timeout(2 * runs.PATIENCE)]

WAITING = """
import os, time
restart = os.environ["DEPLOYKIT_RESTART_COUNT"]
print("restart", restart, flush=True)
if restart == "0":
    time.sleep(900)
"""
TWO = ("resources.nodes=2", "entrypoint={script: waiting.py, launcher: python}")


@pytest.fixture
def small(needs_slurm, tmp_path, monkeypatch):
    """A cluster of three nodes, and a working folder with a job that waits for ever."""
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / "state"))
    (tmp_path / "source").mkdir()
    monkeypatch.chdir(tmp_path / "source")
    (tmp_path / "source" / "job.yaml").write_text(runs.JOB)
    (tmp_path / "source" / "waiting.py").write_text(WAITING)
    with runs.cluster_of(3) as box:
        monkeypatch.setenv("SLURM_CONF", f"{box}/slurm.conf")
        yield box


def begun(run, *settings):
    """A run of which every rank waits."""
    job = runs.submit(run, *TWO, *settings)
    wait_for(lambda: job.log.count("restart 0") == 2, what=lambda: job.log)
    return job


@pytest.fixture
def restart_node(small):
    """A function that kills all of a node, and starts its slurmd anew."""
    started = []

    def restart(node):
        runs.signal_node(small, node, signal.SIGKILL)
        argv = ["/usr/sbin/slurmd", "-D", "-N", node, "-f", f"{small}/slurm.conf"]
        with (small / "log" / "again.out").open("w") as log:
            started.append(subprocess.Popen(argv, stdout=log, stderr=log))

    yield restart
    for process in started:
        process.kill()
        process.wait()


def test_a_node_that_restarts_is_a_node_failure(restart_node):
    job = begun("restarted")
    with runs.Watch({"restarted": job}), runs.awaited([job]):
        restart_node(job.nodes[1])
        job.ended()
        assert job.waited[0] == 0, job.log
    assert job.restarts == ["node_failure"]
    assert "restart 1 pending (node failure 1)" in job.reasons_in("queued")
    assert job.history[-1] == ("succeeded", "after 1 restart (node failure 1)")


@pytest.mark.nightly
def test_it_is_not_restarted_where_the_job_file_forbids_it(restart_node):
    job = begun("forbidden", "slurm.restarts.node_failure=0")
    with runs.Watch({"forbidden": job}):
        restart_node(job.nodes[1])
        job.ended()
    assert (job.restarts, job.history[-1][0]) == ([], "failed")


def test_a_job_on_two_nodes_that_is_cancelled_stays_cancelled(small):
    job = begun("cancelled")
    output("scancel", job.job)
    with runs.Watch({"cancelled": job}):
        job.ended()
    assert (job.restarts, job.history[-1][0]) == ([], "cancelled")
