"""Fixes of failures on a real Slurm cluster: see test_fixes_local."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from deploykit.run import registry
from tests.backends.slurm.slurm_helpers import output, wait_for
from tests.backends.slurm.survival_runs import cluster_of, configure, kill_task
from tests.fixes.printed import commands, log_of, shell, starting, submitted

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

JOB = """\
name: one
entrypoint: {script: train.py, launcher: %s}
resources: {nodes: %d, processes_per_node: 1, time_limit: 5m%s}
env: {OMP_NUM_THREADS: 1}
slurm: %s
"""


@pytest.fixture
def job(cluster, tmp_path, monkeypatch):
    """A function that writes the job of this folder; one rank needs no torchrun, nor torch."""
    folder = tmp_path / "source"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def write(program, slurm="{}", nodes=1, more=""):
        Path("train.py").write_text(program)
        launcher = "python" if nodes == 1 else "torchrun"
        Path("job.yaml").write_text(JOB % (launcher, nodes, more, slurm))

    return write


def submit(run, *words):
    assert cli.main(["submit", "--backend", "slurm", "--run", run, *words]) == 0


def number_of(run):
    """The job of a run."""
    return registry.get(run).id


def running(run):
    """The first node of a run, once its program is running."""
    wait_for(lambda: "up" in log_of(run))
    return output("squeue", "--noheader", f"--jobs={number_of(run)}", "--format=%B").strip()


UP = "import time; print('up', flush=True); time.sleep(float(open('{}').read()))"


def test_a_node_whose_processes_are_killed(job, capsys, tmp_path):
    """The other node's launcher reports it, and ends with exit code 137 itself."""
    seconds = tmp_path / "seconds"
    seconds.write_text("900")
    job(UP.format(seconds), nodes=2)
    submit("before")
    wait_for(lambda: log_of("before").count("] up") == 2)
    kill_task(number_of("before"), 1)
    assert cli.main(["wait", "before"]) == 137
    found = commands(capsys, "before", "killed_by_signal")
    assert "[rank 1] up" in shell(starting(found, "deploykit logs before --node 1")).stdout
    assert "NodeName=" in shell(starting(found, "scontrol show node ")).stdout
    seconds.write_text("0")
    code, _ = submitted(shell(starting(found, "deploykit rerun before")))
    assert code == 0


@pytest.mark.nightly
def test_a_node_that_fails(job, capsys, tmp_path):
    seconds = tmp_path / "seconds"
    seconds.write_text("900")
    job(UP.format(seconds), slurm="{restarts: {node_failure: 0}}")
    submit("before")
    node = running("before")
    output("scontrol", "update", f"nodename={node}", "state=down", "reason=broken")
    try:
        assert cli.main(["wait", "before"]) == 75
        found = commands(capsys, "before", "slurm_node_fail")
        assert f"NodeName={node} " in shell(starting(found, "scontrol show node ")).stdout
        seconds.write_text("0")
        again = starting(found, "deploykit rerun before --set slurm.exclude=")
        code, run = submitted(shell(again))
        assert code == 0
        assert f"ExcNodeList={node} " in output("scontrol", "-o", "show", "job", number_of(run))
    finally:
        shell(f"scontrol update nodename={node} state=resume")  # fails where it has returned


@pytest.mark.nightly
def test_a_job_that_can_never_start(job, capsys):
    job("print('ran')", nodes=9)
    submit("before")
    assert cli.main(["wait", "before"]) == 81
    found = commands(capsys, "before", "job_never_starts")
    shown = shell(starting(found, "sinfo -o '%P %D ")).stdout
    assert "main* 4 " in shown
    assert shell(starting(found, "deploykit doctor --backend slurm")).returncode == 80
    assert shell(starting(found, "deploykit cancel before")).returncode == 0
    assert output("squeue", "--noheader", "--name=before") == ""
    job("print('ran')", nodes=2)
    assert shell(starting(found, "deploykit doctor --backend slurm")).returncode == 0
    submit("after")
    assert cli.main(["wait", "after"]) == 0


@pytest.mark.nightly
def test_a_time_limit(job, capsys, tmp_path):
    seconds = tmp_path / "seconds"
    seconds.write_text("900")
    job(UP.format(seconds))
    submit("before")
    running("before")
    output("scontrol", "update", f"jobid={number_of('before')}", "endtime=now+2")
    assert cli.main(["wait", "before"]) == 124
    found = commands(capsys, "before", "slurm_time_limit")
    assert "main* infinite" in shell(starting(found, "sinfo -o '%P %l'")).stdout
    again = starting(found, "deploykit rerun before --set resources.time_limit=TIME")
    seconds.write_text("0")
    code, run = submitted(shell(again.replace("TIME", "36h")))
    assert code == 0
    assert "#SBATCH --time=2160\n" in (paths.run_folder(run) / "plan.sh").read_text()


GROWS = """\
import time
held = []
for _ in range(60):
    held.append(b"x" * (20 << 20))
    time.sleep(0.2)
"""


def test_a_job_without_enough_memory(needs_slurm, tmp_path, monkeypatch, capsys):
    """On a cluster that ends such jobs; this one measures them each second."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(GROWS)
    often = "{extra: {acctg-freq: task=1}}"
    Path("job.yaml").write_text(JOB % ("python", 1, ", memory: 600MiB", often))
    with cluster_of(1) as box:
        monkeypatch.setenv("SLURM_CONF", str(box / "slurm.conf"))
        configure(box)
        submit("before")
        assert cli.main(["wait", "before"]) != 0
        found = commands(capsys, "before", "slurm_oom")
        again = starting(found, "deploykit rerun before --set resources.memory=SIZE")
        assert submitted(shell(again.replace("SIZE", "6GiB")))[0] == 0


def test_a_limit_of_open_files(job, capsys):
    program = "files = [open('/dev/null') for _ in range(300)]; print('opened')"
    job(program, slurm="{setup: ['ulimit -S -n 256']}")
    submit("before")
    assert cli.main(["wait", "before"]) == 1
    raised = starting(commands(capsys, "before", "fd_limit"), "ulimit -n ")
    job(program, slurm=f"{{setup: ['ulimit -S -n 256', '{raised}']}}")
    submit("after")
    assert cli.main(["wait", "after"]) == 0


def test_a_setup_that_fails(job, capsys):
    job("print('ran')", slurm="{setup: [. nowhere/activate]}")
    submit("before")
    assert cli.main(["wait", "before"]) == 78
    found = commands(capsys, "before", "environment_setup")
    terminal = starting(found, "srun --pty ")
    tried = f"printf '. nowhere/activate\\nexit\\n' | script -qec {terminal!r} /dev/null"
    assert "nowhere/activate: No such file" in shell(tried).stdout
    job("print('ran')", slurm="{setup: ['true']}")
    assert shell(starting(found, "deploykit check")).returncode == 0
    submit("after")
    assert cli.main(["wait", "after"]) == 0


def test_a_node_that_does_not_boot_and_a_controller_that_is_busy(job, capsys, tmp_path):
    """Their logs come from a cloud and from a large site; the commands run on this cluster."""
    job("import sys; sys.exit('BOOT_FAIL: Unable to contact slurm controller')")
    submit("before")
    assert cli.main(["wait", "before"]) == 1
    found = commands(capsys, "before", "slurm_node_boot_failure")
    node = starting(found, "scontrol show node ").replace("NODE", "n1")
    assert "NodeName=n1 " in shell(node).stdout
    job("print('ran')")
    again = starting(found, "scontrol requeue ")
    assert again == f"scontrol requeue {number_of('before')}"
    log = tmp_path / "a.log"
    log.write_text("squeue: error: Unable to contact slurm controller (connect failure)\n")
    found = commands(capsys, log, "slurm_controller_busy")
    assert "is UP" in shell(starting(found, "scontrol ping")).stdout


def test_a_request_that_slurm_rejects(job, capsys, tmp_path):
    log = tmp_path / "a.log"
    log.write_text("sbatch: error: Invalid generic resource (gres) specification\n")
    found = commands(capsys, log, "slurm_bad_request")
    assert "main* gpu:2" in shell(starting(found, "sinfo -o '%P %G ")).stdout
    job("print('ran')", more=", gpus_per_node: 8")
    assert shell(starting(found, "deploykit doctor --backend slurm")).returncode == 80
    job("print('ran')", more=", gpus_per_node: 2")
    assert shell(starting(found, "deploykit doctor --backend slurm")).returncode == 0
