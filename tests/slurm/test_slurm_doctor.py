"""Doctor on a real Slurm cluster, and its profile used where there is no Slurm.

The oracle is the controller itself: `sbatch --test-only` refuses what the profile refuses.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from deploykit import cli
from deploykit.backends import slurm
from deploykit.backends.slurm import fits, site
from deploykit.model import Entrypoint, JobSpec, Resources

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]
GIB = 1024**3


def doctor(capsys, *words):
    code = cli.main(["doctor", "--backend", "slurm", "--json", *words])
    return code, json.loads(capsys.readouterr().out)["findings"]


def test_a_job_that_fits_has_only_notes(cluster, project, capsys):
    code, found = doctor(capsys)
    assert code == 0
    assert {one["severity"] for one in found} == {"note"}
    assert {one["fault"] for one in found} == {"preemption", "no_accounting"}


def test_what_the_cluster_would_refuse_is_found_live_and_from_saved_facts(
    cluster, project, capsys, tmp_path
):
    wish = ["--set", "resources.gpus_per_node=3", "--set", "resources.memory=9GiB"]
    code, found = doctor(capsys, *wish, "--save", str(tmp_path / "facts"))
    assert code == 80
    assert [one["fault"] for one in found[:2]] == ["site_rejects", "site_rejects"]
    assert "no node of partition main has 3 GPUs" in found[0]["message"]
    assert "2 GPUs" in " ".join(found[0]["evidence"])
    assert (code, found) == doctor(capsys, *wish, "--from", str(tmp_path / "facts"))


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
def test_the_profile_refuses_what_the_controller_refuses(name, cluster, make_plan):
    resources, options, path = JOBS[name]
    subprocess.run(["scontrol", "update", "PartitionName=high", "State=INACTIVE"], check=True)
    try:
        chosen = slurm.Options(**options)
        job = JobSpec("one", Entrypoint("train.py"), Resources(**{"time_limit": 600, **resources}))
        problems = list(fits.check(job, chosen, site.read()))
        plan = make_plan("", options=chosen, **resources)
        done = subprocess.run(
            ["sbatch", "--test-only"], input=plan.text, capture_output=True, text=True, check=False
        )
    finally:
        subprocess.run(["scontrol", "update", "PartitionName=high", "State=UP"], check=True)
    assert [problem.path for problem in problems] == ([path] if path else [])
    assert (done.returncode != 0) is bool(path), done.stderr


def test_time_limits_of_a_partition(cluster, project):
    subprocess.run(["scontrol", "update", "PartitionName=low", "MaxTime=4"], check=True)
    try:
        found = site.read()
    finally:
        subprocess.run(["scontrol", "update", "PartitionName=low", "MaxTime=INFINITE"], check=True)
    job = JobSpec("one", Entrypoint("train.py"), Resources(time_limit=600))
    (problem,) = fits.check(job, slurm.Options(partition="low"), found)
    assert problem.path == "resources.time_limit"
    assert "240 s" in problem.message
    assert not list(fits.check(job, slurm.Options(), found))


def test_a_drained_node_makes_the_job_wait(cluster):
    drain = ["scontrol", "update", "NodeName=n1", "Reason=test"]
    subprocess.run([*drain, "State=DRAIN"], check=True)
    try:
        found = site.read()
    finally:
        subprocess.run([*drain, "State=RESUME"], check=True)
    job = JobSpec("one", Entrypoint("train.py"), Resources(time_limit=600, nodes=4))
    (problem,) = fits.check(job, slurm.Options(), found)
    assert (problem.path, problem.severity) == ("resources.nodes", "warning")


def test_a_probe_on_the_cluster_serves_check_off_it(cluster, project, capsys, monkeypatch):
    assert cli.main(["backends", "slurm", "--probe"]) == 0
    assert "4 of 4 nodes usable" in capsys.readouterr().out
    words = ["check", "--backend", "slurm", "--set", "slurm.site=box"]
    with monkeypatch.context() as off_cluster:
        off_cluster.delenv("SLURM_CONF")
        off_cluster.setenv("PATH", "")
        assert cli.main(words) == 0
        assert cli.main([*words, "--set", "slurm.partition=lwo"]) == 65
    said = capsys.readouterr().err
    assert "the profile of box" in said
    assert "did you mean 'low'?" in said
