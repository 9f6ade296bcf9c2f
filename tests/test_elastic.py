"""A job whose number of nodes may change, on this machine: it loses nodes, and gets them back."""

from __future__ import annotations

import textwrap

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from tests import elastic_run
from tests.backends.slurm.slurm_helpers import wait_for

pytestmark = [pytest.mark.torch]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job of two to three nodes, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(elastic_run.SCRIPT)
    (tmp_path / "job.yaml").write_text(
        textwrap.dedent(
            """\
            name: elastic
            entrypoint: {script: train.py}
            resources: {nodes: 2:3, time_limit: 1h}
            env: {OMP_NUM_THREADS: "1"}
            """
        )
    )


@pytest.mark.parametrize("node", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_lost_node_shrinks_the_job_and_its_return_grows_it(node, job):
    assert cli.main(["submit", "--run", "one"]) == 0
    folder = paths.run_folder("one")
    wait_for(lambda: [0, 12] in elastic_run.steps(folder))
    elastic_run.lose(folder, node)
    assert elastic_run.final("one").state == "succeeded"
    assert elastic_run.groups(folder) in elastic_run.LOST_AND_BACK
    assert elastic_run.total(folder) == sum(range(elastic_run.STEPS + 1))
    assert [1, 11] in elastic_run.steps(folder), "what was lost began at the newest checkpoint"
    assert [1, 10] not in elastic_run.steps(folder)
    log = (folder / f"logs/node-{(node + 1) % 3}.log").read_text()
    assert f"node {node} was lost: forming a new group" in log
    assert f"node {node} joins: forming a new group" in log
