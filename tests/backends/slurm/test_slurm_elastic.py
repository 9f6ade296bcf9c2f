"""A job whose number of nodes may change, on a real cluster: it loses a node, by two causes."""

from __future__ import annotations

import textwrap

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from tests import elastic_run
from tests.backends.slurm.slurm_helpers import output, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]


@pytest.fixture
def job(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(elastic_run.SCRIPT)
    (tmp_path / "job.yaml").write_text(
        textwrap.dedent(
            """\
            name: elastic
            entrypoint: {script: train.py}
            resources: {nodes: 2:3, cpus_per_node: 2, time_limit: 1h}
            env: {OMP_NUM_THREADS: "1"}
            """
        )
    )


def submit(run):
    assert cli.main(["submit", "--backend", "slurm", "--run", run]) == 0
    folder = paths.run_folder(run)
    wait_for(lambda: [0, 12] in elastic_run.steps(folder))
    return folder


def test_a_launcher_that_dies_is_started_again_and_joins(job):
    folder = submit("killed")
    elastic_run.lose(folder, 1)
    assert elastic_run.final("killed").state == "succeeded"
    assert elastic_run.groups(folder) in elastic_run.LOST_AND_BACK
    assert elastic_run.total(folder) == sum(range(elastic_run.STEPS + 1))


@pytest.mark.nightly
def test_a_node_that_slurm_sets_to_down_leaves_the_job(job):
    folder = submit("downed")
    number = (folder / "claim").readlink()
    name = output("squeue", "--noheader", f"--jobs={number}", "--format=%N").strip()
    lost = output("scontrol", "show", "hostnames", name).split()[2]
    output("scontrol", "update", f"nodename={lost}", "state=down", "reason=lost")
    try:
        wait_for(lambda: [1, 22] in elastic_run.steps(folder))
        assert elastic_run.groups(folder) == [[0, 3, 3], [1, 2, 3]]
        assert output("squeue", "--noheader", f"--jobs={number}", "--format=%D %r").split() == [
            "2",
            "None",
        ]
    finally:
        output("scontrol", "update", f"nodename={lost}", "state=idle")
    assert cli.main(["cancel", "downed"]) == 0
    assert elastic_run.final("downed").state == "cancelled"
