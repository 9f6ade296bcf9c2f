"""Jobs that survive what a cluster does to them, or end as they should.

The jobs run the reference trainer, all at the same time on one cluster. The fixture `field`
disturbs them, and each test checks one of them. It takes minutes, so it runs at night;
test_slurm_life, test_slurm_reboot, test_slurm_restarts and test_slurm_cap disturb smaller jobs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import trainer_losses
from tests.backends.slurm import survival_runs as runs
from tests.backends.slurm.slurm_helpers import output, wait_for
from tests.programs import need

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]
pytestmark += [pytest.mark.nightly, pytest.mark.timeout(2 * runs.PATIENCE)]

TABLE = Path(__file__).with_name("survival.md")
TWO = "resources.nodes=2"
LOW = "slurm.partition=low"
GRACED = "slurm.partition=graced"
FIRST = {
    "timed": (TWO,),
    "graced": (GRACED,),
    "killed": (TWO,),
    "frozen": (TWO,),
    "downed": (TWO,),
    "alone": (),
    "steady": (),
}
"""Jobs whose disturbance takes long."""
THEN = {
    "worker": (TWO, "retries=1"),
    "requeued": (),
    "preempted": (LOW,),
    "weary": (LOW, "slurm.restarts.preemption=0"),
    "cancelled": (),
    "retried": ("slurm.restarts.error=1", runs.FAULTY),
    "faulty": ("resources.processes_per_node=2", runs.FAULTY),
    "hungry": (
        *("resources.memory=600MiB", "entrypoint.script=hungry.py"),
        "slurm.extra={acctg-freq: task=1}",
    ),
}
"""Jobs that start in the meantime."""

HUNGRY = """
import os, time
held = []
while True:
    held.append(bytearray(os.urandom(1 << 20)) * 50)
    time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def field(needs_slurm, tmp_path_factory):
    """All jobs by name, after they have ended."""
    jobs = {}
    with contextlib.ExitStack() as stack:
        home = enter_home(stack, tmp_path_factory)
        (home / "hungry.py").write_text(HUNGRY)
        box = stack.enter_context(runs.cluster_of(30))
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("SLURM_CONF", f"{box}/slurm.conf")
        runs.configure(box)
        begin(FIRST, jobs, stack)
        with runs.following("downed", home / "state" / "followed"), runs.Watch(jobs):
            for name in FIRST:
                jobs[name].in_mid_run()
            stack.enter_context(runs.another_controller(box))
            disturb_first(jobs, box)
            begin(THEN, jobs, stack)
            run_out_of_time(jobs["timed"])
            disturb_then(jobs)
            for job in jobs.values():
                job.ended()
        yield jobs


def enter_home(stack, tmp_path_factory):
    """A folder with a job file, and a state folder."""
    home = tmp_path_factory.mktemp("field")
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setenv("DEPLOYKIT_HOME", str(home / "state"))
    patch.chdir(home)
    runs.source(home)
    return home


def begin(which, jobs, stack):
    """Submit these jobs, and run `deploykit wait` for each."""
    for name, settings in which.items():
        job = runs.submit(name, *settings)
        stack.enter_context(runs.awaited([job]))
        jobs[name] = job


def disturb_first(jobs, box):
    """Do to each job what its name says."""
    near_the_limit(jobs["timed"])
    make_way(jobs["graced"])
    runs.signal_node(box, jobs["killed"].nodes[1], signal.SIGKILL)
    runs.signal_node(box, jobs["alone"].nodes[0], signal.SIGKILL)
    runs.signal_node(box, jobs["frozen"].nodes[1], signal.SIGSTOP)
    output("scontrol", "update", f"nodename={jobs['downed'].nodes[1]}", "state=down", "reason=test")
    (jobs["steady"].folder / "output" / "go").touch()


def disturb_then(jobs):
    for name in ("worker", "requeued", "preempted", "weary", "cancelled"):
        jobs[name].in_mid_run()
    os.kill(runs.trainer_of(jobs["worker"], 1), signal.SIGKILL)
    output("scontrol", "requeue", jobs["requeued"].job)
    make_way(jobs["preempted"])
    make_way(jobs["weary"])
    assert runs.deploykit("cancel", "cancelled")[0] == 0


def near_the_limit(job):
    """Lower the time limit so that Slurm gives notice at once."""
    used = output("squeue", "--noheader", "--format=%M", f"--jobs={job.job}").split(":")
    minutes = 60 * int(used[-3]) if len(used) > 2 else 0
    output("scontrol", "update", f"jobid={job.job}", f"timelimit={minutes + int(used[-2]) + 2}")


def run_out_of_time(job):
    """Raise the time limit again, so that this happens once."""
    wait_for(lambda: job.restarts, runs.PATIENCE)
    output("scontrol", "update", f"jobid={job.job}", "timelimit=120")


def make_way(job, *chosen):
    """Submit a job of higher priority to the same nodes."""
    wanted = [f"--nodes={len(job.nodes)}", f"--nodelist={','.join(job.nodes)}"]
    options = ["--exclusive", "--output=/dev/null", *(chosen or ["--partition=high"])]
    output("sbatch", *options, *wanted, "--wrap", "sleep 1")


@pytest.fixture(scope="module")
def outranked(needs_slurm, tmp_path_factory):
    """A job that was preempted by one with another QOS, on its own cluster."""
    need("slurmdbd", "mariadbd")
    with contextlib.ExitStack() as stack:
        enter_home(stack, tmp_path_factory)
        box = stack.enter_context(runs.cluster_of(1, "--accounting", 1))
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("SLURM_CONF", f"{box}/slurm.conf")
        runs.preempt_by_quality(box)
        stack.enter_context(runs.another_controller(box))
        jobs = {}
        begin({"outranked": ()}, jobs, stack)
        job = jobs["outranked"]
        with runs.Watch(jobs):
            job.in_mid_run()
            make_way(job, "--qos=urgent")
            job.ended()
        yield job


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The loss of each step of an undisturbed run on one rank."""
    folder = tmp_path_factory.mktemp("undisturbed")
    runs.source(folder)
    places = {f"DEPLOYKIT_{name}_DIR": str(folder / name) for name in ("OUTPUT", "CHECKPOINT")}
    argv = [sys.executable, "train.py", *runs.OPTIONS]
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **places}
    subprocess.run(argv, env=env, cwd=folder, check=True, capture_output=True)
    loss_by_step = trainer_losses.losses(folder / "OUTPUT")
    assert list(loss_by_step) == list(range(1, runs.STEPS + 1))
    return loss_by_step


def assert_trained(job, losses, *, lost=0):
    """The job did all steps with the right losses, and repeated `lost` of them."""
    code, out = job.waited
    assert code == 0, f"{out}\n{job.log}\n{runs.daemon_lines(job)}"
    assert sorted({line["step"] for line in job.steps}) == list(losses), job.log
    assert job.losses == pytest.approx(losses, rel=0, abs=1e-6)
    assert job.lost == lost
    assert job.log.count("[rank 0] test accuracy") == 1


def assert_restarted(job, losses, why, *, lost=0, pending_label=None):
    """The job was restarted for the reason `why`, and its status said so throughout."""
    assert_trained(job, losses, lost=lost)
    assert set(job.restarts) == {why}, job.log
    label, count = why.replace("_", " "), len(job.restarts)
    pending = job.reasons_in("queued") + job.reasons_in("stopping")
    assert f"restart 1 pending ({pending_label or label} 1)" in pending, job.history
    assert f"restart {count} ({label} {count})" in job.reasons_in("running"), job.history
    assert job.history[-1][0] == "succeeded"
    assert f"({label} {count})" in job.history[-1][1]
    before = set(job.states[:-1])
    assert before <= {"queued", "running", "stopping"}, "a job that restarts has not ended"
    assert len(before) > 1
    assert "resumed from " in job.log


@pytest.mark.parametrize(
    ("name", "why", "lost", "logged"),
    [
        ("timed", "time_limit", 0, "after SIGUSR2 the program saved step-"),
        ("preempted", "preemption", 0, ""),
        ("graced", "preemption", 0, r"requeued: restart 1 \(preemption 1\)"),
        ("requeued", "request", 0, ""),
        ("downed", "node_failure", 0, ""),
        # by the launcher on the other node, or by Slurm if torchrun was slow to exit
        ("killed", "node_failure", runs.LOST, "node 1 no longer resp.* exited |DUE TO NODE FAILU"),
        ("frozen", "node_failure", runs.LOST, ""),
        ("alone", "node_failure", runs.LOST, ""),
        ("retried", "error", runs.LOST, ""),
    ],
)
def test_a_job_that_is_restarted(field, losses, name, why, lost, logged):
    """Slurm alone knows why the node of a batch script is gone, and says so only afterwards."""
    pending = "not known yet" if name == "alone" else None
    assert_restarted(field[name], losses, why, lost=lost, pending_label=pending)
    assert re.search(logged, field[name].log)


def test_a_preemption_by_quality_of_service(outranked, losses):
    assert_restarted(outranked, losses, "preemption")


def test_a_rank_that_is_killed_is_restarted_by_torchrun(field, losses):
    job = field["worker"]
    assert_trained(job, losses, lost=runs.LOST)
    assert job.restarts == []
    assert job.states[-1] == "succeeded"


def test_a_restart_of_the_controller(field, losses):
    job = field["steady"]
    assert_trained(job, losses)
    assert job.restarts == []
    assert set(job.states) <= {"queued", "running", "stopping", "succeeded"}
    assert job.states[-1] == "succeeded"


def test_an_error_without_a_restart(field):
    job = field["faulty"]
    assert job.restarts == []
    assert job.history[-1] == ("failed", "rank 1 exited with code 1")
    assert job.waited[0] == 1


def test_out_of_memory_is_not_restarted(field):
    job = field["hungry"]
    assert job.restarts == []
    code, out = job.waited
    assert code == 137
    assert "exceeded its Slurm memory limit" in out
    assert job.history[-1] == (
        "failed",
        "all processes were killed before any process recorded a reason",
    )


def test_restarts_that_are_used_up(field):
    job = field["weary"]
    assert job.restarts == ["preemption"]
    assert job.history[-1][0] == "failed"
    assert "slurm.restarts.preemption allows no restarts" in job.history[-1][1]
    assert f"--set checkpoints={job.folder}/checkpoints" in job.history[-1][1]
    assert job.waited[0] == 75


def test_a_cancelled_job_stays_cancelled(field):
    job = field["cancelled"]
    assert job.restarts == []
    assert job.states[-1] == "cancelled"
    assert job.waited[0] == 143


def test_a_log_is_followed_across_a_requeue(field):
    """It shows every line of every rank once, including the last one."""
    job = field["downed"]
    followed = (job.folder.parents[1] / "followed").read_text().splitlines()
    logs = "".join(path.read_text() for path in (job.folder / "logs").glob("node-*.log"))
    written = [line.split(" ", 1)[1] for line in logs.splitlines() if " [rank " in line]
    assert sorted(line for line in followed if line.startswith("[rank ")) == sorted(written)
    assert any(line.startswith("[rank 0] test accuracy") for line in followed)


HEADS = ("what happened", "what followed", "steps lost", "counted as", "`status`", "`wait`")
SAVED = "the ranks saved and exited; deploykit requeued the job"
WARNED = "the ranks saved and exited; Slurm requeued the job"
NOTICED = "the other ranks exited; the job was requeued without that node"
ROWS = {
    "timed": ("the time limit approached", SAVED),
    "graced": ("preempted, with two minutes of grace", SAVED),
    "preempted": ("preempted, without grace", WARNED),
    "outranked": ("preempted by a job of another QOS", WARNED),
    "requeued": ("`scontrol requeue`", WARNED),
    "downed": ("one of two nodes set to DOWN", WARNED),
    "killed": ("one of two nodes killed", NOTICED),
    "frozen": ("one of two nodes frozen", NOTICED),
    "alone": ("its only node killed", "Slurm requeued the job on another node"),
    "worker": ("one rank killed with SIGKILL, `retries: 1`", "torchrun restarted the ranks"),
    "steady": ("the controller restarted", "nothing"),
    "retried": ("an exception, `restarts: {error: 1}`", "deploykit requeued the job"),
    "faulty": ("an exception", "nothing"),
    "hungry": ("out of memory", "nothing"),
    "weary": (
        "preempted, `restarts: {preemption: 0}`",
        "Slurm requeued the job; it exited at once",
    ),
    "cancelled": ("`deploykit cancel`", "nothing"),
}
"""Jobs, and the first two columns of the table for each."""


def test_the_table_shows_the_measurements(field, outranked):
    """DEPLOYKIT_WRITE=1 makes this test rewrite the table."""
    jobs = {**field, "outranked": outranked}
    rows = [(*columns, *measured(jobs[name])) for name, columns in ROWS.items()]
    lines = ["| " + " | ".join(row) + " |" for row in (HEADS, ("---",) * len(HEADS), *rows)]
    before, mark, rest = TABLE.read_text().partition("<!-- measured -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    page = "\n".join([before + mark, *lines, "", end + after])
    if os.environ.get("DEPLOYKIT_WRITE"):
        TABLE.write_text(page)
    assert page == TABLE.read_text()


def measured(job):
    """Steps lost, the reason counted, `status` while pending and finally, exit code of `wait`."""
    state, reason = job.history[-1]
    pending = re.search(
        r"restart 1 pending \(.*?\)", job.reasons_in("queued") + job.reasons_in("stopping")
    )
    status = f"{pending[0]}; {state}" if pending else state
    if state == "failed":
        status += f": {reason.partition(';')[0]}"
    lost = str(job.lost) if state == "succeeded" else ""
    return lost, f"`{job.restarts[0]}`" if job.restarts else "", status, str(job.waited[0])


@pytest.mark.nightly
def test_two_jobs_that_choose_from_two_ports(cluster, losses, tmp_path, monkeypatch):
    """Each has two nodes on this machine; both choose from the same two ports."""
    monkeypatch.chdir(tmp_path)
    runs.source(tmp_path)
    low = free_pair()
    settings = [TWO, f"env.DEPLOYKIT_PORTS={low}-{low + 1}", "slurm.exclusive=false"]
    jobs = [runs.submit(name, *settings, runs.UNHARMED) for name in ("one", "other")]
    with runs.awaited(jobs):
        for job in jobs:
            assert_trained(job, losses)
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
    raise AssertionError("no two consecutive ports are free")
