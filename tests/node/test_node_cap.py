"""The cost cap on a node: the launcher's own clock, saving in time, and attempts that add up."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from deploykit_node import records
from deploykit_node.cluster import Cluster
from deploykit_node.restart import cap
from deploykit_node.restart.attempt import Attempt

SAVER = """\
    import os, pathlib, signal, sys, time
    def save(number, frame):
        folder = pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"step-{os.environ['RANK']}.pt").write_text("weights")
        print("saved", flush=True)
        sys.exit(75)
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif "plain" not in sys.argv:
        signal.signal(signal.SIGTERM, save)
    print("pid", os.getpid(), flush=True)
    while True:
        time.sleep(0.05)
"""
TORCHRUN = ["torchrun", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=0", "--"]


def value(seconds):
    return json.dumps({"seconds": seconds, "cap": "50.00 USD", "hourly": "14.18 USD"})


def test_without_the_variable_there_is_no_cap():
    assert cap.begin({}, 0) is None


def test_half_of_a_short_time_and_90_s_of_a_long_one_are_for_saving():
    now = time.monotonic()
    long, short = (cap.begin({cap.VARIABLE: value(n)}, 0) for n in (7200, 100))
    assert long.end_at - long.stop_at == pytest.approx(90)
    assert short.end_at - short.stop_at == pytest.approx(50, abs=1)
    assert long.end_at - now == pytest.approx(7200, abs=5)


def test_earlier_attempts_count_with_what_their_first_node_has_kept(tmp_path):
    env = {cap.VARIABLE: value(1000), "DEPLOYKIT_RUN_DIR": str(tmp_path)}
    first = cap.begin(env, 0)
    began = records.read(first.record)["began"]
    os.utime(first.record, (began + 300, began + 300))  # it ran for 300 s, and was killed
    second = cap.begin({**env, "SLURM_RESTART_COUNT": "1"}, 0)
    assert second.end_at - time.monotonic() == pytest.approx(700 - cap.KEEP, abs=5)
    assert not second.used_up
    os.utime(first.record, (began + 999, began + 999))
    assert cap.begin({**env, "SLURM_RESTART_COUNT": "1"}, 0).used_up


def test_slurm_tells_when_the_job_began(tmp_path):
    env = {cap.VARIABLE: value(1000), "SLURM_JOB_START_TIME": str(int(time.time()) - 400)}
    assert cap.begin(env, 0).end_at - time.monotonic() == pytest.approx(600, abs=5)


def test_on_sagemaker_a_fresh_machine_counts_from_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(cap, "_UPTIME", tmp_path / "uptime")
    monkeypatch.setattr(cap, "_INPUT", tmp_path / "input")
    env = {cap.VARIABLE: value(1000), "SM_HOSTS": '["algo-1"]'}
    (tmp_path / "uptime").write_text("350.20 600.00\n")
    assert cap.begin(env, 0).end_at - time.monotonic() == pytest.approx(650, abs=5)
    (tmp_path / "uptime").write_text("86400.00 1.00\n")  # of a warm pool
    assert cap.begin(env, 0).end_at - time.monotonic() == pytest.approx(1000, abs=5)


def test_a_used_up_cap_starts_nothing(tmp_path):
    env = {cap.VARIABLE: value(3), "DEPLOYKIT_RUN_DIR": str(tmp_path)}
    end = Attempt(env, Cluster("slurm", 0, ("n0",))).begin()
    assert end.code == records.STOPPED
    assert "its cost cap is exhausted (50.00 USD, at 14.18 USD an hour)" in end.reason


def patiently(bundle, *words, **env):
    """Run two ranks with a cap that leaves time to start them: how it ended, the cap, and when."""
    for seconds in (40, 160, 640):
        begun = time.monotonic()
        done = bundle.run(*TORCHRUN, "saver.py", *words, DEPLOYKIT_CAP=value(seconds), **env)
        if done.log.count(" pid ") == 2:
            break
    return done, seconds, time.monotonic() - begun


@pytest.mark.torch
@pytest.mark.slow
def test_the_ranks_save_and_the_run_can_be_resumed(bundle):
    bundle.write("saver.py", SAVER)
    checkpoints = bundle.run_dir / "checkpoints"
    done, seconds, took = patiently(bundle, DEPLOYKIT_CHECKPOINT_DIR=checkpoints)
    assert done.code == records.STOPPED, done.log
    assert took < seconds + 60
    assert {path.name for path in checkpoints.iterdir()} == {"step-0.pt", "step-1.pt"}
    reason = bundle.end("node-0")["reason"]
    assert reason.startswith("stopped at its cost cap (50.00 USD, at 14.18 USD an hour): ")
    assert "saved step-" in reason
    assert "--set checkpoints=" in reason
    assert "the cost cap is near" in done.log


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"), [pytest.param("plain", 143, marks=pytest.mark.nightly), ("deaf", 137)]
)
def test_ranks_that_do_not_save_end_with_the_cap_all_the_same(bundle, how, code):
    bundle.write("saver.py", SAVER)
    done, seconds, took = patiently(bundle, how)
    assert done.code == code, done.log
    assert took < seconds + 60
    assert bundle.end("node-0")["reason"].startswith("stopped at its cost cap")


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("save", 75),
        ("plain", -signal.SIGTERM),
        ("deaf", -signal.SIGKILL),
    ],
)
@pytest.mark.slow
def test_below_another_launcher_each_rank_keeps_the_cap(bundle, as_rank, tmp_path, how, code):
    """As on SageMaker, whose toolkit starts the ranks itself, and sends no signal."""
    bundle.write("saver.py", SAVER)
    words = [*TORCHRUN[:1], "--nnodes=2", *TORCHRUN[2:], "saver.py", how]
    env = {**as_rank, "DEPLOYKIT_CAP": value(10), "DEPLOYKIT_CHECKPOINT_DIR": tmp_path / "kept"}
    begun = time.monotonic()
    done = bundle.run(*words, **env)
    took = time.monotonic() - begun
    assert done.code == code, done.log
    assert 4 <= took < 10 + 60
    assert "the cost cap is near (50.00 USD, at 14.18 USD an hour): SIGTERM sent" in done.log
    assert (tmp_path / "kept" / "step-3.pt").exists() is (how == "save")


def test_a_program_that_ends_before_its_cap_is_not_touched(bundle, as_rank):
    bundle.write("short.py", "print('done')")
    words = [*TORCHRUN[:1], "--nnodes=2", *TORCHRUN[2:], "short.py"]
    done = bundle.run(*words, **as_rank, DEPLOYKIT_CAP=value(3600))
    assert (done.code, done.said["rank 3"]) == (0, ["done"])
