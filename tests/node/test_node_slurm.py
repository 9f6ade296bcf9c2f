"""launch.py under a real Slurm, whose nodes have names that do not resolve."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]

LISTEN = """\
    import os, signal, sys, time
    got = []
    for name in ("SIGUSR2", "SIGTERM"):
        signal.signal(getattr(signal, name), lambda number, _: got.append(number))
    print("ready", os.environ["MASTER_ADDR"])
    while not got:
        time.sleep(0.05)
    time.sleep(1)
    print("got", *got)
"""


@pytest.fixture
def slurm(cluster):
    """The environment in which the commands talk to the cluster."""
    return {name: os.environ[name] for name in ("PATH", "SLURM_CONF")}


def submit(bundle, slurm, *words):
    """Start `words` on two nodes; returns the job's id and its log."""
    launch = [sys.executable, ".deploykit/launch.py", *words]
    log = bundle.run_dir / "job.log"
    script = f"#!/bin/sh\nexec srun --ntasks-per-node=1 --kill-on-bad-exit=1 {shlex.join(launch)}\n"
    sbatch = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={log}"]
    job = subprocess.run(
        sbatch,
        cwd=bundle.source,
        env={**slurm, "DEPLOYKIT_BACKEND": "slurm", "DEPLOYKIT_RUN_DIR": str(bundle.run_dir)},
        input=script,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return job, log


def wait_for(path, text, count=1, patience=600):
    deadline = time.monotonic() + patience
    while not path.exists() or path.read_text().count(text) < count:
        shown = path.read_text() if path.exists() else "(none)"
        assert time.monotonic() < deadline, shown
        time.sleep(0.1)


def ended(job, slurm, patience=600):
    """What the controller says of the job once its script has ended."""
    deadline = time.monotonic() + patience
    while True:
        show = ["scontrol", "show", "job", job]
        shown = subprocess.run(show, env=slurm, check=True, capture_output=True, text=True).stdout
        if "JobState=RUNNING" not in shown and "JobState=COMPLETING" not in shown:
            return shown
        assert time.monotonic() < deadline, shown
        time.sleep(0.1)


TORCHRUN = ["torchrun", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", "--"]


@pytest.mark.parametrize("name", ["USR2", "TERM"])
def test_a_signal_to_the_step_leaves_the_ranks_time_to_end_well(bundle, slurm, name):
    bundle.write("listen.py", LISTEN)
    job, log = submit(bundle, slurm, *TORCHRUN, "listen.py")
    wait_for(log, "ready 127.0.0.1", 2)
    subprocess.run(["scancel", f"--signal={name}", job], env=slurm, check=True)
    for node in (0, 1):
        wait_for(bundle.run_dir / "exit_records" / f"node-{node}.json", "finished")
        assert bundle.end(f"node-{node}")["exit_code"] == 0
    got = re.findall(r"\[rank \d\] got (.*)", log.read_text())
    assert len(got) == 2
    if name == "USR2":  # Slurm's own and launch.py's are told apart; torchrun adds a second TERM
        assert got == ["12", "12"]


def test_the_rank_that_failed_first_is_named_on_both_nodes(bundle, slurm):
    bundle.write(
        "fail.py",
        """\
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(900)
        """,
    )
    job, _ = submit(bundle, slurm, *TORCHRUN, "fail.py")
    for node in (0, 1):
        wait_for(bundle.run_dir / "exit_records" / f"node-{node}.json", "finished")
        assert bundle.end(f"node-{node}")["reason"] == "rank 1 exited with code 7"
    assert "ExitCode=7:0" in ended(job, slurm)
