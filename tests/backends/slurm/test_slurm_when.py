"""`deploykit when` on a real cluster, in different states of its queue."""

from __future__ import annotations

import json
import subprocess

import pytest

from deploykit.backends.slurm import commands, sbatch
from deploykit.cli import main as cli
from deploykit.job import file as jobfile
from tests.backends.slurm.slurm_helpers import output, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

JOB = """\
name: hello  # a comment
entrypoint: {script: train.py}
resources: {nodes: 2, time_limit: 5m}
slurm:
  price: 36 USD/node-hour
  restarts: {preemption: 0, time_limit: 0, node_failure: 0, transient: 0}
"""


@pytest.fixture
def site(cluster, project, monkeypatch):
    """The cluster with partitions of its own: `low` has n1 and n2, `high` n3 and n4."""
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "slurm")
    (project / "job.yaml").write_text(JOB)
    update("low", "Nodes=n1,n2")
    update("high", "Nodes=n3,n4")
    yield project
    for name in ("low", "high"):
        update(name, "Nodes=ALL", "State=UP", "MaxTime=UNLIMITED")


def update(partition, *changes):
    subprocess.run(["scontrol", "update", f"PartitionName={partition}", *changes], check=True)


def occupy(partition, nodes, minutes):
    """Keep nodes of a partition busy."""
    argv = ["sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", "--exclusive"]
    argv += [f"--partition={partition}", f"--nodes={nodes}", f"--time={minutes}"]
    job = output(*argv, "--wrap=sleep 600").strip()
    wait_for(lambda: output("squeue", "--noheader", f"--jobs={job}", "--format=%T") == "RUNNING\n")


@pytest.fixture
def when(site, capsys):
    def ask(*words, code=0):
        capsys.readouterr()
        assert cli.main(["when", *words, "--json"]) == code, capsys.readouterr().err
        starts = json.loads(capsys.readouterr().out)["starts"]
        return {one["where"].removeprefix("partition "): one for one in starts}

    return ask


def test_a_free_cluster_starts_it_now_where_the_job_says(when, site):
    found = when("--pick")
    assert next(iter(found)) == "main"
    assert {name: one["seconds"] < 60 for name, one in found.items()} == dict.fromkeys(found, True)
    assert found["main"]["cost"]["worst"] == pytest.approx(7.2)
    assert (site / "job.yaml").read_text() == JOB


def test_the_earliest_partition_is_picked_and_starts_the_job(when, site):
    occupy("high", 2, 20)
    found = when("--set", "slurm.partition=high", "--pick")
    assert list(found) == ["main", "low", "high"]
    assert found["main"]["seconds"] < 60
    assert 15 * 60 < found["high"]["seconds"] <= 20 * 60
    assert found["high"]["settings"] == {}
    text = JOB.replace("slurm:\n", "slurm:\n  partition: main\n")
    assert (site / "job.yaml").read_text() == text
    assert cli.main(["submit", "--run", "one"]) == 0
    assert cli.main(["wait", "one"]) == 0


def picked(site):
    return jobfile.parse(site / "job.yaml")[0]["slurm"].get("partition")


def test_a_queue_in_every_partition_has_an_order(when, site):
    occupy("high", 2, 30)
    occupy("low", 1, 10)
    found = when("--nodes", "3")
    assert list(found)[:1] == ["main"]
    assert 5 * 60 < found["main"]["seconds"] <= 30 * 60
    assert [name for name, one in found.items() if not one["possible"]] == ["low", "high"]
    found = when("--set", "slurm.partition=high", "--pick")
    assert 5 * 60 < found["low"]["seconds"] <= 10 * 60 < 25 * 60 < found["high"]["seconds"]
    assert picked(site) == next(iter(found)) != "high"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("State=DOWN", "partition low is DOWN"),
        ("State=DRAIN", "partition low is DRAIN"),
        ("MaxTime=2", "partition low has a time limit of 120 s"),
    ],
)
def test_a_partition_that_would_not_start_it_is_last(when, site, change, reason):
    update("low", change)
    found = when("--set", "slurm.partition=low", "--pick")
    assert picked(site) == next(iter(found))
    assert list(found)[-1] == "low"
    assert (found["low"]["possible"], found["low"]["reason"]) == (False, reason)
    assert found["low"]["start"] is None


def test_where_it_could_start_nowhere_the_code_says_so(when, site, capsys):
    found = when("--nodes", "5", "--pick", code=81)
    assert not any(one["possible"] for one in found.values())
    assert cli.main(["when", "--nodes", "5"]) == 81
    assert (
        "partition main\t-\t-\t18.00 USD\tpartition main has only 4 nodes"
        in capsys.readouterr().out
    )


def test_what_slurm_itself_refuses(when):
    found = when("--set", "slurm.constraint=nope|never", code=81)
    assert found["main"]["reason"].startswith("Invalid feature specification")


def test_nothing_is_queued(when):
    when()
    assert output("squeue", "--noheader") == ""


def test_a_cluster_that_does_not_answer_is_no_refusal(site, capsys, monkeypatch):
    argv = ["sh", "-c", "echo 'sbatch: error: Unable to contact slurm controller' >&2; exit 1"]
    monkeypatch.setattr(commands, "clean_environment", lambda _: [*argv, "sh"])
    assert cli.main(["when"]) == 69
    assert "Unable to contact slurm controller" in capsys.readouterr().err
    assert sbatch._UTC[0] == "TZ=UTC"
