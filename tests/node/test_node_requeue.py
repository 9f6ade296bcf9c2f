"""Stopping with a checkpoint, and what a launcher knows about its own job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from deploykit_node.cluster import Cluster
from deploykit_node.network import alive
from deploykit_node.records import NodeExit
from deploykit_node.restart import checkpoints, slurm_job
from deploykit_node.restart.attempt import Attempt

RUNNING = (
    "JobId=7 JobName=a-1 UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) "
    "Requeue=1 Restarts=2 BatchFlag=1 ExitCode=0:0 RunTime=00:00:40 TimeLimit=1-00:01:00 "
    "StartTime=2026-11-21T09:33:00 PreemptTime=None Partition=low ReqNodeList=(null) "
    "NodeList=n[3-4] BatchHost=n3 Comment=Restarts=9"
)
GRACE = RUNNING.replace("PreemptTime=None", "PreemptTime=2026-11-21T09:33:02")
LATE = RUNNING.replace("JobState=RUNNING Reason=None", "JobState=COMPLETING Reason=TimeLimit")


def test_a_job_is_read_from_what_scontrol_shows():
    job = slurm_job.parse(RUNNING)
    assert (job.state, job.restarts, job.nodes) == ("RUNNING", 2, ("n3", "n4"))
    assert (job.left, job.preempted, job.timed_out) == (86_420, False, False)
    assert slurm_job.parse(GRACE).preempted
    assert slurm_job.parse(LATE).timed_out
    endless = slurm_job.parse(RUNNING.replace("1-00:01:00", "UNLIMITED"))
    assert not endless.timed_out
    assert slurm_job.parse("JobId=7 NodeList=(null)").nodes == ()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (" DUE TO PREEMPTION", "preemption"),
        (" DUE TO JOB REQUEUE", "request"),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "node_failure"),
        (" DUE TO TIME LIMIT", "time_limit"),
        ("", None),
    ],
)
def test_the_step_daemons_line_names_the_cause(tmp_path, words, why):
    log = tmp_path / "logs" / "node-0.log"
    log.parent.mkdir()
    ended = "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 09:49"
    log.write_text(f"{ended} DUE TO TIME LIMIT ***\n")
    before = slurm_job.log_sizes(tmp_path, 0)
    with log.open("a") as file:
        file.write("2026-11-21T09:00:00.000Z [rank 0] *** STEP 7.0 DUE TO PREEMPTION ***\n")
        file.write(f"{ended}{words} ***\n")
    assert slurm_job.cause(tmp_path, 0, before) == why


def test_the_log_of_an_array_tasks_batch_script_names_the_cause_too(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    for folder in ("logs", "tasks/7/logs"):
        (tmp_path / folder).mkdir(parents=True)
    ended = "slurmstepd-n1: error: *** JOB 38 ON n1 CANCELLED AT 09:49 DUE TO PREEMPTION ***\n"
    (tmp_path / "logs/slurm-7.log").write_text(ended)
    assert slurm_job.cause(tmp_path / "tasks/7", 0, {}) == "preemption"


def test_the_first_recorded_reason_is_kept(tmp_path):
    (tmp_path / "exit_records").mkdir()
    env = {"DEPLOYKIT_RUN_DIR": str(tmp_path)}
    slurm_job.record_restart(env, 1, "time_limit")
    slurm_job.record_restart(env, 1, "node_failure")
    slurm_job.record_restart(env, 2, "time_limit")
    assert slurm_job.describe(slurm_job.restarts(env, 2)) == "time limit 2"
    slurm_job.withdraw_restart(env, 2)
    assert slurm_job.why_restarted(env, 2) is None
    assert [path.name for path in (tmp_path / "exit_records").iterdir()] == ["restart-1.json"]


def test_only_a_complete_new_checkpoint_counts(tmp_path):
    (tmp_path / "step-1.pt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").touch()
    before = checkpoints.snapshot(str(tmp_path))
    assert checkpoints.newest(before, str(tmp_path)) is None
    for name in (".hidden", "saving.tmp", "step-2.pt.part", "x_tmp"):
        (tmp_path / name).touch()
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "__0_0.distcp").touch()
    assert checkpoints.newest(before, str(tmp_path)) is None
    (sharded / ".metadata").touch()
    assert checkpoints.newest(before, str(tmp_path)) == "sharded"
    later = time.time_ns() + 10**9
    os.utime(tmp_path / "folder" / "a", ns=(later, later))
    assert checkpoints.newest(before, str(tmp_path)) == "folder"
    assert checkpoints.newest(before, str(tmp_path), since=time.time() + 60) is None
    assert checkpoints.snapshot("s3://bucket/x") == checkpoints.snapshot(f"{tmp_path}/no") == {}


def test_a_node_is_lost_when_its_heartbeat_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(alive, "_PATIENCE", 0.5)
    (tmp_path / "exit_records").mkdir()
    env = {"DEPLOYKIT_RUN_DIR": str(tmp_path)}
    listeners = [alive.start(env, node, "127.0.0.1") for node in (0, 1)]
    assert alive.lost_nodes(env, 0) == []
    listeners[1].close()
    assert alive.lost_nodes(env, 0) == [1]
    assert alive.lost_nodes({**env, "SLURM_RESTART_COUNT": "1"}, 0) == []  # none of this attempt's
    (tmp_path / "exit_records" / "node-1.json").write_text(json.dumps({"attempt": 0}))
    assert alive.lost_nodes(env, 0) == []
    listeners[0].close()


def test_connections_of_others_do_not_make_a_node_seem_lost(tmp_path):
    """More than a socket keeps in its queue (128 by default in Python)."""
    (tmp_path / "exit_records").mkdir()
    env = {"DEPLOYKIT_RUN_DIR": str(tmp_path)}
    listener = alive.start(env, 1, "127.0.0.1")
    port = json.loads((tmp_path / "exit_records" / "heartbeat-1.json").read_text())["port"]
    with contextlib.ExitStack() as idle:
        for _ in range(300):
            connection = idle.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
        assert alive.lost_nodes(env, 0) == []
    listener.close()


TORCHRUN = ["torchrun", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--"]
STOPS = """\
    import os, signal, sys, time
    def stop(number, frame):
        if os.environ["RANK"] == "0":
            time.sleep(2)
            open(os.environ["DEPLOYKIT_CHECKPOINT_DIR"] + "/step-7.pt", "w").close()
            print("saved")
        sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR2, stop)
    print("begun")
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("shown", "outcome"),
    [
        (GRACE, "SIGTERM arrived early; requeued: restart 3 (node failure 2, preemption 1)"),
        (RUNNING, "SIGTERM arrived early"),
    ],
    ids=["preempted", "running"],
)
def test_a_job_preempted_before_any_rank_has_started_is_requeued(
    tmp_path, monkeypatch, shown, outcome
):
    """A signal that a user sends leaves the job running, and is no preemption."""
    (tmp_path / "exit_records").mkdir()
    env = {"DEPLOYKIT_RUN_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    env["DEPLOYKIT_RESTARTS"] = '{"preemption": 5}'
    monkeypatch.setattr(slurm_job, "query", lambda _: slurm_job.parse(shown))
    monkeypatch.setattr(slurm_job, "requeue", lambda _: None)
    attempt = Attempt(env, Cluster("slurm", 0, ("n3", "n4")))
    attempt.on_signal(signal.SIGTERM, 0)
    assert attempt.stop_signal == signal.SIGTERM
    assert attempt.settle(NodeExit(143, "SIGTERM arrived early", stopped=True)).reason == outcome


@pytest.mark.torch
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_ranks_that_stop_with_75_are_neither_restarted_nor_cut_short(bundle, tmp_path, number):
    bundle.write("stops.py", STOPS)
    folder = tmp_path / "checkpoints"
    started = bundle.start(*TORCHRUN, "stops.py", DEPLOYKIT_CHECKPOINT_DIR=folder)
    started.wait_for("begun", 2)
    started.process.send_signal(number)
    done = started.finish()
    assert done.code == 75, done.log
    assert done.said["rank 0"] == ["begun", "saved"]
    assert done.said["rank 1"] == ["begun"]
    told = f"after {signal.Signals(number).name} the program saved step-7.pt"
    assert bundle.end("node-0")["reason"] == (
        f"{told} and exited with code 75; to resume, submit the job again with "
        f"--set checkpoints={folder}"
    )
    assert bundle.end("node-0")["ranks"] == {"0": 75, "1": 75}
    assert "Traceback" not in done.log


@pytest.mark.torch
def test_torchrun_does_not_receive_a_sigterm_to_every_process(bundle, tmp_path):
    """Slurm sends it twice for a preemption, and torchrun would then abandon its ranks."""
    bundle.write("stops.py", STOPS)
    started = bundle.start(*TORCHRUN, "stops.py", DEPLOYKIT_CHECKPOINT_DIR=tmp_path)
    started.wait_for("begun", 2)
    children = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children")
    torchrun = int(children.read_text())
    for _ in range(2):
        os.kill(torchrun, signal.SIGTERM)
        time.sleep(0.1)
    started.process.terminate()
    done = started.finish()
    assert done.code == 75, done.log
    assert "saved" in done.said["rank 0"]


@pytest.mark.torch
def test_a_notice_waits_for_a_program_that_is_still_loading(bundle, tmp_path):
    bundle.write("stops.py", "    import time\n    print('loading')\n    time.sleep(2)\n" + STOPS)
    started = bundle.start(*TORCHRUN, "stops.py", DEPLOYKIT_CHECKPOINT_DIR=tmp_path)
    started.wait_for("loading", 2)
    started.process.send_signal(signal.SIGUSR2)
    assert started.finish().code == 75


@pytest.mark.torch
def test_a_75_without_a_signal_is_reported(bundle):
    bundle.write("quits.py", "raise SystemExit(75)\n")
    done = bundle.run(*TORCHRUN, "quits.py")
    assert done.code == 75
    assert "but it received no stop signal" in bundle.end("node-0")["reason"]
