"""The stacks of a job's ranks, taken by a step beside them on each of their nodes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import jobs
from deploykit.job.model import Handle
from deploykit.lib.errors import TryAgain, UsageError
from deploykit.observe import exit_records, stacks
from tests.backends.slurm.slurm_helpers import ended, wait_for

HANGING = """
import os, time
def work():
    if os.environ.get("RANK") == "5":
        time.sleep(900)
    time.sleep(900)
print("up", flush=True)
work()
"""
STANDING = ["work at train.py:5: time.sleep(900)", "work at train.py:6: time.sleep(900)"]


def test_one_task_on_each_node_beside_the_others():
    argv = jobs.step_argv(Handle("slurm", "localhost", "42", "one", "/x"), ["n1", "n2"])
    assert argv[0] == "srun"
    assert {"--jobid=42", "--overlap", "--nodelist=n1,n2", "--ntasks=2"} <= set(argv)


@pytest.fixture
def hang(cluster, make_plan, send, monkeypatch):
    """A function that starts ranks on two nodes; later commands run as if inside another job."""
    handles = []

    def start(ranks, **more):
        more |= {"nodes": 2, "processes_per_node": ranks // 2}
        launcher = "python" if ranks == 2 else "torchrun"
        handles.append(send(make_plan(HANGING, launcher=launcher, **more)))
        folder = Path(handles[0].folder)
        monkeypatch.setenv("SLURM_NNODES", "1")
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        wait_for(lambda: len(exit_records.processes(folder)) == ranks)
        return handles[0], folder

    yield start
    slurm.cancel(handles[0])
    ended(handles[0])


@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.xdist_group("slurm")
def test_stacks_of_eight_ranks_on_two_nodes_and_a_command_beside_one(hang):
    """The command has input that it reads, and runs on the second node."""
    handle, folder = hang(8, env={"MINE": "a  b"})

    def all_up():
        name = str(time.monotonic_ns())
        assert slurm.dump(handle, folder / "stacks" / name, native=False) == []
        dump = stacks.read(folder / "stacks" / name)
        merged = stacks.groups(dump.ranks)
        where = [str(group.place) for group in merged]
        return (dump, merged) if where == STANDING else None

    dump, merged = wait_for(all_up)
    assert [group.label for group in merged] == ["rank 5", "ranks 0-4,6-7"]
    assert len({one.host for one in dump.ranks}) == 2
    assert {one.tool for one in dump.ranks} == {"py-spy"}, list(stacks.lines(dump))
    assert dump.absent == []
    hosts = {one.rank: one.host for one in exit_records.processes(folder)}
    script = 'cat; echo "$RANK $MINE $SLURMD_NODENAME $PWD"; exit 7'
    argv = slurm.enter(handle, 5, ["sh", "-c", script], terminal=False)
    done = subprocess.run(argv, input="in\n", capture_output=True, text=True, check=False)
    assert done.stdout == f"in\n5 a  b {hosts[5]} {folder / 'source'}\n", done.stderr
    assert done.returncode == 7
    assert "--pty" in slurm.enter(handle, 5, (), terminal=True)
    assert len(exit_records.processes(folder)) == 8  # all go on


def looked_at(folder):
    """How many ranks the launchers have looked at, since they are quiet."""
    processes = folder.glob("exit_records/process-*.json")
    pids = {json.loads(path.read_text())["pid"] for path in processes}
    with contextlib.suppress(OSError):  # a folder of another test has just been removed
        looks = Path(tempfile.gettempdir()).glob("deploykit-*/look-*/*.json")
        ranks = [rank for path in looks for rank in json.loads(path.read_text())["ranks"]]
        return len(pids & {rank["process"]["pid"] for rank in ranks if rank["tool"]})
    return 0


def is_timed_out(handle):
    """The limit becomes a minute, which Slurm notices within another."""
    update = ["scontrol", "update", f"JobId={handle.id}", "TimeLimit=1"]
    subprocess.run(update, check=True)


def is_cancelled(handle):
    slurm.cancel(handle)


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize(
    "end",
    [pytest.param(is_timed_out, marks=pytest.mark.nightly), is_cancelled],
    ids=["a time limit", "scancel"],
)
def test_a_job_that_hangs_until_slurm_stops_it_keeps_its_stacks(end, hang):
    """Slurm ends the ranks itself, before its signal has reached the launchers."""
    handle, folder = hang(2, env={"DEPLOYKIT_STALL_SECONDS": "120"})
    logs = [folder / "logs" / f"node-{node}.log" for node in range(2)]
    wait_for(lambda: all(path.read_text().count("] up") == 1 for path in logs))
    wait_for(lambda: looked_at(folder) == 2)
    end(handle)
    status = ended(handle)
    assert status.native.partition(" ")[0] in {"TIMEOUT", "CANCELLED"}
    text = wait_for(lambda: stacks.stall_reason(folder, ended=True))  # the launchers end later
    assert text.endswith(" before it was stopped: all 2 ranks are in work (train.py:6)")


def test_a_job_without_a_running_rank(make_plan, tmp_path):
    handle = Handle("slurm", "localhost", "42", "one-1", str(tmp_path))
    for error, match in ((TryAgain, "no rank of one-1 is running"), (UsageError, "is a job array")):
        with pytest.raises(error, match=match):
            slurm.dump(handle, tmp_path / "stacks/1", native=False)
        with pytest.raises(error, match=match):
            slurm.enter(handle, 0, (), terminal=True)
        (tmp_path / "array").write_text("3\n")
