"""The diagnosis of logs from real jobs that failed in the ways of Slurm.

All jobs run at the same time on one cluster, in the fixture `failed`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from tests.backends.slurm.slurm_helpers import output, wait_for
from tests.backends.slurm.survival_runs import cluster_of, configure

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

IDLE = "echo up; sleep 900"
HUNGRY = """\
import os, time
held = []
while True:
    held.append(os.urandom(1 << 20) * 50)
    time.sleep(0.1)
"""
ONE_RAISES = """\
import os
if os.environ["SLURM_PROCID"] == "1":
    raise ValueError("label 7 is not below 5")
"""
JOBS = {
    "slurm_time_limit": (IDLE, ()),
    "slurm_preempted": (IDLE, ("--partition=low", "--no-requeue")),
    "slurm_node_fail": (IDLE, ("--no-requeue",)),
    "slurm_cancelled": (IDLE, ()),
    "slurm_oom": (f"{sys.executable} hungry.py", ("--mem=100", "--acctg-freq=task=1")),
    "command_not_found": ("torchrunn train.py", ()),
    "user_code_error": (f"srun --label {sys.executable} one.py", ("--ntasks=2",)),
    "slurm_bad_request": ("srun --ntasks=9 true", ()),
}
"""The expected cause, the command of the batch script, and its options."""
PROOFS = {
    "slurm_time_limit": "DUE TO TIME LIMIT",
    "slurm_preempted": "DUE TO PREEMPTION",
    "slurm_node_fail": "DUE TO NODE FAILURE",
    "slurm_cancelled": "CANCELLED AT",
    "slurm_oom": "memory limit",
    "command_not_found": "torchrunn: not found",
    "user_code_error": "ValueError: label 7 is not below 5",
    "slurm_bad_request": "Unable to create step",
}
REFUSED = {
    "invalid partition": ("--partition=nope",),
    "node configuration is not available": ("--nodes=1", "--mem=9T"),
    "Invalid --time specification": ("--time=soon",),
    "Invalid feature": ("--constraint=a100",),
    "Invalid generic resource": ("--gres=tpu:1",),
}
"""Error texts of sbatch, and options that cause them."""


@pytest.fixture(scope="module")
def failed(needs_slurm, tmp_path_factory):
    """The log of each job by cause, and the complaint of sbatch by error text."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "hungry.py").write_text(HUNGRY)
    (folder / "one.py").write_text(textwrap.dedent(ONE_RAISES))
    with pytest.MonkeyPatch.context() as patch, cluster_of(len(JOBS)) as box:
        patch.setenv("SLURM_CONF", str(box / "slurm.conf"))
        configure(box)
        patch.chdir(folder)
        jobs = {label: submitted(label, *JOBS[label]) for label in JOBS}
        cause_failures(jobs)
        wait_for(lambda: not output("squeue", "--noheader", f"--jobs={','.join(jobs.values())}"))
        return {label: folder / f"{label}.log" for label in jobs} | {
            text: refused(folder / f"{text}.log", options) for text, options in REFUSED.items()
        }


def submitted(label, script, options):
    words = ["--nodes=1", "--exclusive", f"--output={label}.log", "--parsable", *options]
    return output("sbatch", *words, "--wrap", script).strip()


def refused(log, options):
    argv = ["sbatch", *options, "--wrap", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode
    log.write_text(done.stderr)
    return log


def cause_failures(jobs):
    """Do to each idle job what its name says."""
    waiting = [label for label, (script, _) in JOBS.items() if script == IDLE]
    nodes = {label: up(jobs[label], Path(f"{label}.log")) for label in waiting}
    output("scancel", jobs["slurm_cancelled"])
    down = ["state=down", "reason=test"]
    output("scontrol", "update", f"nodename={nodes['slurm_node_fail']}", *down)
    words = ["--partition=high", "--exclusive", f"--nodelist={nodes['slurm_preempted']}"]
    output("sbatch", *words, "--output=/dev/null", "--wrap", "true")
    output("scontrol", "update", f"jobid={jobs['slurm_time_limit']}", "endtime=now+2")


def up(job, log):
    """The node of a job, once its script is running there: the log then gets Slurm's messages."""
    wait_for(lambda: log.exists() and "up" in log.read_text())
    return output("squeue", "--noheader", "--format=%N", f"--jobs={job}").strip()


def first_finding(log, capsys):
    assert cli.main(["diagnose", str(log), "--json"]) == 79, log.read_text()
    first, *_ = json.loads(capsys.readouterr().out)["causes"]
    assert {proof["file"] for proof in first["evidence"]} == {str(log)}
    return first


@pytest.mark.parametrize("label", JOBS)
def test_the_cause_of_a_failed_job(label, failed, capsys):
    first = first_finding(failed[label], capsys)
    assert first["cause"] == label, failed[label].read_text()
    assert any(PROOFS[label] in proof["text"] for proof in first["evidence"]), first
    if label == "user_code_error":
        assert first["first_rank"] == 1


@pytest.mark.parametrize("text", REFUSED)
def test_the_cause_of_a_refusal(text, failed, capsys):
    first = first_finding(failed[text], capsys)
    assert first["cause"] == "slurm_bad_request", failed[text].read_text()
    assert any(text in proof["text"] for proof in first["evidence"]), first
