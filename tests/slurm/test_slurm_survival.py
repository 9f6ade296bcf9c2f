"""What a cluster does to jobs, done to real ones: each goes on, or ends, as it is meant to.

All run at the same time on one cluster. `happened` lets it all happen, and each test looks at
what became of one job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import survival_runs as runs
from slurm_helpers import output, wait_for
from survivor import AT, EVERY

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]
pytestmark += [pytest.mark.timeout(2 * runs.PATIENCE)]

TWO = "resources.nodes=2"
LOW = "slurm.partition=low"
FAULTY = "entrypoint.args=['60', fail]"
LOST = AT % EVERY
"""Steps since the last checkpoint, where nobody gave notice."""
FIRST = {
    "graced": (TWO, LOW),
    "worker": (TWO, "retries=1"),
    "downed": (TWO,),
    "killed": (TWO,),
    "frozen": (TWO,),
    "faulty": (TWO, FAULTY),
    "requeued": (),
    "preempted": (LOW,),
    "weary": (LOW, "slurm.restarts.preemption=0"),
    "cancelled": (),
    "alone": (),
    "timed": (TWO, "slurm.signal_seconds=10"),
    "asked": ("slurm.restarts.error=1", FAULTY),
}
LATER = {
    "hungry": (
        *("resources.memory=600MiB", "entrypoint.script=hungry.py"),
        "slurm.extra={acctg-freq: task=1}",
    ),
}
"""Those that begin while the others train, since they end by themselves."""

HUNGRY = """
import os, time
held = []
while True:
    held.append(bytearray(os.urandom(1 << 20)) * 50)
    time.sleep(0.2)
"""


@pytest.fixture
def field(happened, monkeypatch):
    """All jobs by name, after everything has happened to them."""
    jobs, variables = happened
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return jobs


@pytest.fixture(scope="module")
def happened(needs_slurm, tmp_path_factory):
    """The jobs, and the variables by which commands find them."""
    home = tmp_path_factory.mktemp("field")
    jobs = {}
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("DEPLOYKIT_HOME", str(home / "state"))
        patch.chdir(home)
        Path("job.yaml").write_text(runs.JOB)
        Path("hungry.py").write_text(HUNGRY)
        shutil.copy(runs.SURVIVOR, home)
        box = stack.enter_context(runs.big_cluster(29))
        patch.setenv("SLURM_CONF", str(box / "slurm.conf"))
        for name, settings in FIRST.items():
            jobs[name] = runs.submit(name, *settings)
        with (
            runs.following("downed", home / "followed"),
            runs.Watch(jobs),
        ):
            for name in set(jobs) - {"faulty", "asked"}:
                jobs[name].in_mid_run()
            stack.enter_context(runs.another_controller(box))
            for name, settings in LATER.items():
                jobs[name] = runs.submit(name, *settings)
            happen(jobs, box)
            for job in jobs.values():
                job.ended()
        yield jobs, {name: os.environ[name] for name in ("DEPLOYKIT_HOME", "SLURM_CONF")}


def happen(jobs, box):
    """To each what it is named after."""
    output("scontrol", "requeue", jobs["requeued"].job)
    make_way(jobs["preempted"])
    make_way(jobs["weary"])
    assert runs.deploykit("cancel", "cancelled")[0] == 0
    os.kill(runs.trainer_of(jobs["worker"], 1), signal.SIGKILL)
    runs.strike(box, jobs["killed"].nodes[1], signal.SIGKILL)
    runs.strike(box, jobs["alone"].nodes[0], signal.SIGKILL)
    runs.strike(box, jobs["frozen"].nodes[1], signal.SIGSTOP)
    output("scontrol", "update", f"nodename={jobs['downed'].nodes[1]}", "state=down", "reason=test")
    run_out_of_time(jobs["timed"])
    for name in ("preempted", "weary"):
        wait_for(lambda name=name: jobs[name].seen[-1][0] != "running", runs.PATIENCE)
    output("scontrol", "update", "partition=low", "gracetime=30")
    make_way(jobs["graced"])


def run_out_of_time(job):
    """Let the time limit come near, whatever the job has used of it, and once only."""
    used = output("squeue", "--noheader", "--format=%M", f"--jobs={job.job}").split(":")
    minutes = 60 * int(used[-3]) if len(used) > 2 else 0
    update = ["scontrol", "update", f"jobid={job.job}"]
    output(*update, f"timelimit={minutes + int(used[-2]) + 1}")
    wait_for(lambda: job.seen[-1][0] == "queued", runs.PATIENCE)
    output(*update, "timelimit=120")


def make_way(job):
    """Send a job of higher priority to the same nodes."""
    wanted = [f"--nodes={len(job.nodes)}", f"--nodelist={','.join(job.nodes)}"]
    options = ["--partition=high", "--exclusive", "--output=/dev/null"]
    output("sbatch", *options, *wanted, "--wrap", "sleep 1")


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The loss of each step of a run that nothing happens to, on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    folders = {f"DEPLOYKIT_{name}_DIR": str(folder) for name in ("OUTPUT", "CHECKPOINT")}
    env = {"PATH": os.environ["PATH"], "DEPLOYKIT_RESTART_COUNT": "0", **place, **folders}
    argv = [sys.executable, runs.SURVIVOR, str(runs.STEPS)]
    subprocess.run(argv, env=env, check=True, capture_output=True)
    lines = map(json.loads, (folder / "steps.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def trained(job, losses, *, lost=0):
    """The job did all steps with the right numbers, and `lost` of them twice."""
    assert runs.deploykit("wait", job.run)[0] == 0, job.log
    assert sorted({line["step"] for line in job.steps}) == list(range(1, runs.STEPS + 1)), job.log
    for line in job.steps:
        assert line["loss"] == pytest.approx(losses[line["step"]], abs=1e-6)
    assert job.lost == lost
    assert job.log.count("[rank 0] finished") == 1


def went_on(job, losses, why, *, lost=0, told=None):
    """The job was started again for that reason, and that was told at each moment."""
    trained(job, losses, lost=lost)
    assert set(job.restarts) == {why}, job.log
    label, count = why.replace("_", " "), len(job.restarts)
    waited = job.said("queued") + job.said("stopping")
    assert f"restart 1 to come ({told or label} 1)" in waited, job.seen
    assert f"restart {count} ({label} {count})" in job.said("running"), job.seen
    assert job.seen[-1][0] == "succeeded"
    assert f"({label} {count})" in job.seen[-1][1]
    before = set(job.states[:-1])
    assert before <= {"queued", "running", "stopping"}, "what comes back has not ended"
    assert len(before) > 1
    assert "resumed from step-" in job.log


def test_the_time_limit(field, losses):
    went_on(field["timed"], losses, "time_limit")
    assert "told to stop by SIGUSR2, it saved step-" in field["timed"].log


def test_a_preemption_without_grace(field, losses):
    went_on(field["preempted"], losses, "preemption")


def test_a_preemption_with_grace(field, losses):
    went_on(field["graced"], losses, "preemption")
    assert "put back into the queue: restart 1 (preemption 1)" in field["graced"].log


def test_a_requeue_by_hand(field, losses):
    went_on(field["requeued"], losses, "request")


def test_a_node_that_is_set_down(field, losses):
    went_on(field["downed"], losses, "node_failure")


def test_a_node_that_dies_under_the_others(field, losses):
    went_on(field["killed"], losses, "node_failure", lost=LOST)
    # the launcher on the other node, or Slurm where torchrun took its time to end
    noticed = ("node 1 does not answer any more, and rank 0 ended with", "DUE TO NODE FAILURE")
    assert any(words in field["killed"].log for words in noticed)


def test_a_node_that_dies_with_the_batch_script(field, losses):
    went_on(field["alone"], losses, "node_failure", lost=LOST, told="not known yet")


def test_a_node_that_freezes(field, losses):
    went_on(field["frozen"], losses, "node_failure", lost=LOST)


def test_an_error_that_is_to_be_tried_again(field, losses):
    went_on(field["asked"], losses, "error", lost=LOST)


def test_a_worker_that_is_killed_is_started_again_by_torchrun(field, losses):
    job = field["worker"]
    trained(job, losses, lost=LOST)
    assert job.restarts == []
    assert job.states[-1] == "succeeded"


def test_an_error_of_the_users_is_not_tried_again(field):
    job = field["faulty"]
    assert job.restarts == []
    assert job.seen[-1] == ("failed", "rank 1 ended with exit code 1")
    assert runs.deploykit("wait", job.run)[0] == 1


def test_out_of_memory_is_not_tried_again(field):
    job = field["hungry"]
    assert job.restarts == []
    code, said = runs.deploykit("wait", job.run)
    assert code == 137
    assert "more memory than Slurm gave it" in said
    assert job.seen[-1] == ("failed", "all its processes were killed, and none could say why")


def test_restarts_that_are_used_up(field):
    job = field["weary"]
    assert job.restarts == ["preemption"]
    assert job.seen[-1][0] == "failed"
    assert "slurm.restarts.preemption allows no restarts" in job.seen[-1][1]
    assert f"--set checkpoints={job.folder}/checkpoints" in job.seen[-1][1]
    assert runs.deploykit("wait", job.run)[0] == 75


def test_a_cancelled_job_stays_cancelled(field):
    job = field["cancelled"]
    assert job.restarts == []
    assert job.states[-1] == "cancelled"
    assert runs.deploykit("wait", job.run)[0] == 143


def test_a_log_is_followed_across_a_requeue(field):
    """Every line of every rank once, the last one too."""
    job = field["downed"]
    followed = (job.folder.parents[2] / "followed").read_text().splitlines()
    logs = "".join(path.read_text() for path in (job.folder / "logs").glob("node-*.log"))
    written = [line.split(" ", 1)[1] for line in logs.splitlines() if " [rank " in line]
    assert sorted(line for line in followed if line.startswith("[rank ")) == sorted(written)
    assert "[rank 0] finished" in followed


def test_two_jobs_that_want_one_port(cluster, losses, tmp_path, monkeypatch):
    """Two nodes each, all on this machine, and two ports alone to choose from."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(runs.JOB.replace("exclusive: true, ", ""))
    shutil.copy(runs.SURVIVOR, tmp_path)
    low = free_pair()
    settings = [TWO, f"env.DEPLOYKIT_PORTS={low}-{low + 1}", "entrypoint.args=['60']"]
    jobs = [runs.submit(name, *settings) for name in ("one", "other")]
    for job in jobs:
        trained(job, losses)
    ports = [re.search(r"node 0 of 2 .* port (\d+)", job.log)[1] for job in jobs]
    assert sorted(map(int, ports)) == [low, low + 1]


def free_pair():
    for low in range(28_000, 30_000, 2):
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("", low))
                two.bind(("", low + 1))
            except OSError:
                continue
            return low
    raise AssertionError("no two free ports side by side")
