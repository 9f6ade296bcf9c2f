"""The stall rule with real ranks: five kinds of stalls, slow phases, restarts, and ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.observe import stacks
from tests.backends.slurm.slurm_helpers import wait_for

pytestmark = [pytest.mark.torch, pytest.mark.slow]

STALLS = """\
import os, signal, threading, time

rank = int(os.environ["RANK"])
if rank < 3:  # the others have no use for torch
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, i):
            time.sleep(900)

    dist.init_process_group("gloo", rank=rank, world_size=3)

def sums():
    dist.all_reduce(torch.ones(1))

def loads():
    for _ in DataLoader(Images(), num_workers=1):
        pass

def receives():
    dist.recv(torch.zeros(1), src=0)

def locks():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def stops():
    os.kill(os.getpid(), signal.SIGSTOP)

def spins():
    while True:
        sum(range(100_000))
        time.sleep(0.02)  # a tenth of a processor is enough

print("begin", flush=True)
[sums, loads, receives, locks, stops, spins][rank]()
"""
WHERE = {
    0: "all_reduce (train.py:18)",
    1: "__next__ (train.py:21)",
    2: "recv (train.py:25)",
    3: "locks (train.py:30)",
    4: "stopped by a signal in stops (train.py:33)",
    5: "spins (train.py:",
}
HEALTHY = """\
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
minimum = float(os.environ["DEPLOYKIT_STALL_SECONDS"])
print("begin", flush=True)

def evaluate(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.randn(50, 50) @ torch.randn(50, 50)

def save(seconds):
    end = time.monotonic() + seconds
    with open(os.environ["DEPLOYKIT_OUTPUT_DIR"] + "/checkpoint", "wb") as file:
        while time.monotonic() < end:
            file.write(bytes(1 << 21))
            time.sleep(0.05)

if dist.get_rank() == 0:
    save(1.5 * minimum)
    print("saved", flush=True)
    evaluate(1.5 * minimum)
dist.barrier()
dist.destroy_process_group()
print("end", flush=True)
"""
HANGS_ONCE = """\
import os, threading
print("begin", flush=True)
if os.environ["DEPLOYKIT_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    threading.Event().wait()
"""


def submit(capsys, program, *settings):
    Path("train.py").write_text(program)
    settings = ("resources.time_limit=1h", *settings)
    more = [word for setting in settings for word in ("--set", setting)]
    capsys.readouterr()
    assert cli.main(["submit", "--backend", "local", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def reason(capsys):
    capsys.readouterr()
    assert cli.main(["status", "--json"]) == 0
    return json.loads(capsys.readouterr().out)[0]["reason"]


def log(row):
    path = Path(row["folder"], "logs/node-0.log")
    return path.read_text() if path.exists() else ""


def test_each_stalled_rank_is_found_at_its_line(project, capsys):
    row = submit(
        *(capsys, STALLS, "resources.processes_per_node=6", "env.DEPLOYKIT_STALL_SECONDS='8'")
    )
    wait_for(lambda: log(row).count("] begin") == 6)

    def found():
        kept = sorted(Path(row["folder"], "stacks").glob("*-stall"))
        merged = stacks.groups(stacks.read(kept[-1]).ranks) if kept else []
        seen = {rank: group.place.brief for group in merged for rank in group.numbers}
        right = [rank for rank, where in WHERE.items() if where in seen.get(rank, "")]
        return kept if right == list(WHERE) else None

    wait_for(found)
    assert reason(capsys).startswith("no progress for ")
    assert " more ranks elsewhere" in reason(capsys)
    assert "the stacks are in" in log(row)
    assert cli.main(["cancel", row["run"]]) == 0
    for path in Path(row["folder"], "exit_records").glob("process-4.json"):
        os.kill(json.loads(path.read_text())["pid"], signal.SIGCONT)
    assert cli.main(["wait", row["run"]]) == 143


def test_slow_phases_are_no_stall(project, capsys):
    """A long checkpoint, and an evaluation on one rank for which the others wait."""
    settings = ("resources.processes_per_node=2", "env.DEPLOYKIT_STALL_SECONDS='10'")
    row = submit(capsys, HEALTHY, *settings)
    assert cli.main(["wait", row["run"]]) == 0
    after = log(row).partition("] begin")[2]
    assert after.count("] end") == 2
    assert "no progress for" not in after
    assert not list(Path(row["folder"], "exit_records").glob("stall-*.json"))


def test_a_stalled_run_is_restarted_on_request(project, capsys):
    settings = ("on_stall=restart", "retries=1", "env.DEPLOYKIT_STALL_SECONDS='3'")
    row = submit(capsys, HANGS_ONCE, "resources.processes_per_node=2", *settings)
    assert cli.main(["wait", row["run"]]) == 0
    assert "on_stall: restart: sending SIGKILL to the ranks" in log(row)
    assert list(Path(row["folder"], "stacks").glob("*-stall"))


HANGS = """\
import threading
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("begin", flush=True)
if dist.get_rank() == 1:
    threading.Event().wait()
dist.all_reduce(torch.ones(1))
"""
WORKS = """\
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(1))
    print("begin", flush=True)
    time.sleep(0.05)
"""
LATE = "hang: the ranks made no progress\n"


def ends_at_its_time_limit(row):
    """As the alarm of the launchers' parent does."""
    os.kill(int(Path(row["folder"], "claim").read_text()), signal.SIGALRM)


def is_cancelled(row):
    assert cli.main(["cancel", row["run"]]) == 0


def diagnosed(capsys, row):
    capsys.readouterr()
    code = cli.main(["diagnose", row["run"]])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(ends_at_its_time_limit, 124, id="a time limit"),
        pytest.param(is_cancelled, 143, id="a cancel", marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_hangs_until_it_is_stopped_is_called_a_hang(end, code, project, capsys):
    settings = ("resources.processes_per_node=2", "env.DEPLOYKIT_STALL_SECONDS='20'")
    row = submit(capsys, HANGS, *settings)
    wait_for(lambda: log(row).count("] begin") == 2)
    path = Path(row["folder"], "logs/node-0.log")
    wait_for(lambda: time.time() - path.stat().st_mtime > 4)  # twice what is a hang at the end
    end(row)
    assert cli.main(["wait", row["run"]]) == code
    status, text = diagnosed(capsys, row)
    assert (status, text.startswith(LATE)) == (79, True), text
    assert "rank 0 is in all_reduce (train.py:9), rank 1 is in <module> (train.py:8)" in text
    assert "time_limit" not in text.partition("fix")[0]
    assert list(Path(row["folder"], "stacks").glob("*-stall/*.json"))
    assert cli.main(["status", row["run"]]) == 0
    assert "hang, the ranks made no progress: " in capsys.readouterr().out
    assert cli.main(["dump", row["run"]]) == 0
    assert "threading.Event().wait()" in capsys.readouterr().out


def test_a_run_that_works_until_its_time_limit_needs_a_longer_one(project, capsys):
    row = submit(capsys, WORKS, "env.DEPLOYKIT_STALL_SECONDS='20'")
    wait_for(lambda: log(row).count("] begin") > 20)
    ends_at_its_time_limit(row)
    assert cli.main(["wait", row["run"]]) == 124
    status, text = diagnosed(capsys, row)
    assert (status, text.partition(":")[0]) == (79, "time_limit"), text
    assert not list(Path(row["folder"]).glob("stacks/*"))


def test_a_run_that_works_until_it_is_cancelled_hung_nowhere(project, capsys):
    row = submit(capsys, WORKS, "env.DEPLOYKIT_STALL_SECONDS='20'")
    wait_for(lambda: log(row).count("] begin") > 20)
    is_cancelled(row)
    assert cli.main(["wait", row["run"]]) == 143
    assert "hang" not in diagnosed(capsys, row)[1].partition("\n")[0]
    assert not list(Path(row["folder"]).glob("stacks/*"))


def test_a_living_run_that_hangs_is_told_of_as_in_its_status(project, capsys):
    settings = ("resources.processes_per_node=2", "env.DEPLOYKIT_STALL_SECONDS='3'")
    row = submit(capsys, HANGS, *settings)
    wait_for(lambda: reason(capsys).startswith("no progress for "))
    told = reason(capsys)
    status, text = diagnosed(capsys, row)
    assert (status, text.partition(":")[0]) == (79, "hang")
    assert told.partition(": ")[2] in text
    is_cancelled(row)
