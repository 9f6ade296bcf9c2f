"""Slurm with accounting: jobs that the controller no longer knows keep their status."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import Options
from deploykit.job.model import State
from tests.backends.slurm.slurm_helpers import cluster_command, ended, folder_of, output, wait_for
from tests.programs import need

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("accounts")]


@pytest.fixture
def accounts(box, monkeypatch):
    """A cluster with slurmdbd and its own database."""
    need("slurmdbd", "mariadbd")
    start(box)
    monkeypatch.setenv("SLURM_CONF", str(box / "slurm.conf"))
    return box


def start(box):
    done = cluster_command("start", box, "--nodes", "2", "--accounting", "1")
    assert done.returncode == 0, done.stderr


def test_sacct_has_jobs_of_an_earlier_controller(accounts, make_plan, send, tmp_path):
    good = send(make_plan("print('done')", run="good"))
    held = send(make_plan("", run="held", options=Options(extra={"hold": ""})))
    many = send(make_plan("raise SystemExit(3)", run="many", options=Options(array=2)))
    slurm.cancel(held)
    before = {handle: ended(handle) for handle in (good, held, many)}
    wait_for(lambda: all_recorded([good, held, many], tasks=4))
    assert cluster_command("stop", accounts).returncode == 0
    start(accounts)  # the new controller has no jobs
    assert subprocess.run(["scontrol", "show", "job", good.id], check=False).returncode != 0
    shutil.rmtree(folder_of("good", tmp_path) / "exit_records")
    after = slurm.status([good, held, many])
    assert (after[good].state, after[good].native) == (State.SUCCEEDED, "COMPLETED")
    assert after[held].state is State.CANCELLED
    assert (after[many].state, after[many].exit_code) == (State.FAILED, 3)
    assert after[many].reason == before[many].reason


def all_recorded(handles, *, tasks):
    """Whether the database has the final state of each task, which arrives with a delay."""
    jobs = ",".join(handle.id for handle in handles)
    words = ["--allocations", "--noheader", "--format=State", f"--jobs={jobs}"]
    states = [line.split()[0] for line in output("sacct", *words).splitlines()]
    return len(states) == tasks and not {"PENDING", "RUNNING"} & set(states)
