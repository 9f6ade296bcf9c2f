"""Doctor on a real Slurm cluster, and its profile on a machine without Slurm.

`sbatch --test-only` must reject exactly the jobs that the profile rejects.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import site
from deploykit.cli import main as cli
from deploykit.job.model import Entrypoint, JobSpec, Resources

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]
GIB = 1024**3


def doctor(capsys, *words):
    code = cli.main(["doctor", "--backend", "slurm", "--json", *words])
    return code, json.loads(capsys.readouterr().out)["findings"]


def test_a_job_that_fits_the_cluster_has_only_notes(cluster, project, capsys):
    code, findings = doctor(capsys)
    assert code == 0
    assert {one["severity"] for one in findings} == {"note"}
    assert {one["code"] for one in findings} == {"preemption", "no_accounting"}


def test_what_the_cluster_would_reject_is_found_live_and_from_saved_facts(
    cluster, project, capsys, tmp_path
):
    settings = ["--set", "resources.gpus_per_node=3", "--set", "resources.memory=9GiB"]
    code, findings = doctor(capsys, *settings, "--save", str(tmp_path / "facts"))
    assert code == 80
    assert [one["code"] for one in findings[:2]] == ["site_rejects", "site_rejects"]
    assert "no node in partition main has 3 GPUs" in findings[0]["message"]
    assert "2 GPUs" in " ".join(findings[0]["evidence"])
    assert (code, findings) == doctor(capsys, *settings, "--from", str(tmp_path / "facts"))


JOBS = {
    "fits": ({"nodes": 4, "gpus_per_node": 2, "cpus_per_node": 8, "memory": 7 * GIB}, {}, ""),
    "too many nodes": ({"nodes": 5}, {}, "resources.nodes"),
    "too many GPUs": ({"gpus_per_node": 3}, {}, "resources.gpus_per_node"),
    "too many CPUs": ({"cpus_per_node": 9}, {}, "resources.cpus_per_node"),
    "too much memory": ({"memory": 9 * GIB}, {}, "resources.memory"),
    "no such partition": ({}, {"partition": "gpu"}, "slurm.partition"),
    "no such feature": ({}, {"constraint": "a100"}, "slurm.constraint"),
    "partition that is down": ({}, {"partition": "high"}, "slurm.partition"),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_profile_rejects_what_the_controller_rejects(name, cluster, make_plan):
    resources, options, path = JOBS[name]
    subprocess.run(["scontrol", "update", "PartitionName=high", "State=INACTIVE"], check=True)
    try:
        chosen = slurm.Options(**options)
        job = JobSpec("one", Entrypoint("train.py"), Resources(**{"time_limit": 600, **resources}))
        problems = list(site.problems(job, chosen, site.read()))
        plan = make_plan("", options=chosen, **resources)
        done = subprocess.run(
            ["sbatch", "--test-only"], input=plan.text, capture_output=True, text=True, check=False
        )
    finally:
        subprocess.run(["scontrol", "update", "PartitionName=high", "State=UP"], check=True)
    assert [problem.path for problem in problems] == ([path] if path else [])
    assert (done.returncode != 0) is bool(path), done.stderr


@pytest.mark.parametrize(
    ("change", "undo", "partition", "path", "severity", "said"),
    [
        ("MaxTime=4", "MaxTime=INFINITE", "low", "resources.time_limit", "error", "240 s"),
        ("State=DRAIN", "State=RESUME", None, "resources.nodes", "warning", "3 of 4 suitable"),
    ],
)
def test_a_change_of_the_cluster_is_seen(cluster, change, undo, partition, path, severity, said):
    """The limit of a partition, which others do not have; a drained node."""
    what = ["PartitionName=low"] if partition else ["NodeName=n1", "Reason=test"]
    subprocess.run(["scontrol", "update", *what, change], check=True)
    try:
        profile = site.read()
    finally:
        subprocess.run(["scontrol", "update", *what, undo], check=True)
    job = JobSpec("one", Entrypoint("train.py"), Resources(time_limit=600, nodes=4))
    (problem,) = site.problems(job, slurm.Options(partition=partition), profile)
    assert (problem.path, problem.severity) == (path, severity)
    assert said in problem.message
    assert not partition or not list(site.problems(job, slurm.Options(), profile))


def test_a_profile_of_the_cluster_is_used_by_check_elsewhere(cluster, project, capsys, monkeypatch):
    assert cli.main(["backends", "slurm", "--probe"]) == 0
    assert "4 of 4 nodes usable" in capsys.readouterr().out
    words = ["check", "--backend", "slurm", "--set", "slurm.site=box"]
    with monkeypatch.context() as off_cluster:
        off_cluster.delenv("SLURM_CONF")
        off_cluster.setenv("PATH", "")
        assert cli.main(words) == 0
        assert cli.main([*words, "--set", "slurm.partition=lwo"]) == 65
    err = capsys.readouterr().err
    assert "site profile of box" in err
    assert "did you mean 'low'?" in err
