"""`deploykit dump` on this machine: ranks that hang, and healthy ones that are not disturbed."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from deploykit.backends import ranks
from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.run import registry
from tests.backends.slurm.slurm_helpers import wait_for
from tests.observe.stack_samples import NEXT, REDUCE, node_data, rank, write

HANGING = """\
import os, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, i):
        if i == 6 and os.environ["RANK"] == "1":
            time.sleep(900)
        return torch.zeros(2)

def step(batch):
    total = batch.sum()
    dist.all_reduce(total)

dist.init_process_group("gloo")
for batch in DataLoader(Images(), num_workers=1, batch_size=2):
    step(batch)
"""
HEALTHY = """\
import asyncio, hashlib, os, subprocess, sys, threading
from pathlib import Path
import torch
import torch.distributed as dist

STEPS = 60
dist.init_process_group("gloo")
weights, digest = torch.zeros(1000), hashlib.sha256()
threading.Thread(target=lambda: asyncio.run(asyncio.sleep(3600)), daemon=True).start()

def step(number):
    torch.manual_seed(number * dist.get_world_size() + dist.get_rank())
    gradient = torch.randn(1000)
    dist.all_reduce(gradient)
    weights.add_(gradient, alpha=0.01)

number = 0
stop = torch.zeros(1)
while number < STEPS or not stop:
    step(number)
    number += 1
    if number <= STEPS:
        digest.update(weights.numpy().tobytes())
        if number % 30 == 0:
            digest.update(subprocess.run(["echo", "x"], check=True, capture_output=True).stdout)
    stop[:] = float(Path(os.environ["ENOUGH"]).exists())
    dist.all_reduce(stop, dist.ReduceOp.MIN)
if dist.get_rank() == 0:
    Path(os.environ["DEPLOYKIT_OUTPUT_DIR"], "digest").write_text(digest.hexdigest())
dist.destroy_process_group()
sys.exit(3)
"""


def deploykit(capsys, *argv, code=0):
    capsys.readouterr()
    assert cli.main(list(argv)) == code
    shown = capsys.readouterr()
    return json.loads(shown.out) if "--json" in argv else shown.out + shown.err


def submit(capsys, program, *settings):
    Path("train.py").write_text(program)
    more = [word for setting in settings for word in ("--set", setting)]
    return deploykit(capsys, "submit", "--backend", "local", "--json", *more)


@pytest.fixture
def without_spy(tmp_path, monkeypatch):
    """A Python with PyTorch and without py-spy, for the job; nor has deploykit one."""
    monkeypatch.setattr(ranks, "_py_spy", lambda: None)
    home, python = tmp_path / "env", Path(sys.executable)
    site = home / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    site.mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin/python").symlink_to(python.resolve())
    (home / "pyvenv.cfg").write_text(f"home = {python.resolve().parent}\n")
    (site / "real.pth").write_text(sysconfig.get_path("purelib") + "\n")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return f"local.python={home}/bin/python"


@pytest.mark.torch
@pytest.mark.parametrize("tool", ["py-spy", "faulthandler"])
def test_the_rank_that_hangs_and_its_line_come_first(tool, project, capsys, request):
    settings = [request.getfixturevalue("without_spy")] if tool == "faulthandler" else []
    row = submit(capsys, HANGING, "resources.processes_per_node=3", *settings)
    started = Path(row["folder"], "exit_records").glob
    wait_for(lambda: len(list(started("process-*.json"))) == 3)

    def hanging():
        capsys.readouterr()
        if cli.main(["dump", "--json"]):
            return None  # no rank has started Python yet
        found = json.loads(capsys.readouterr().out)
        stands = "__next__ (train.py:19), ranks 0,2 are in all_reduce (train.py:16)"
        return found if found["summary"].endswith(stands) else None

    found = wait_for(hanging)
    first, second = found["groups"]
    assert (first["ranks"], second["ranks"]) == ([1], [0, 2])
    assert first["function"].endswith("__next__")
    assert first["called_at"]["text"].startswith("for batch in DataLoader(")
    assert {one["tool"] for one in found["ranks"]} == {tool}
    text = deploykit(capsys, "dump")
    assert "\nranks 0,2: all_reduce, called at train.py:16: dist.all_reduce(total)\n" in text
    if tool == "py-spy":
        assert "  1 child process pt_data_worker: Images.__getitem__ at train.py:11: time" in text
        assert "c10d::" in deploykit(capsys, "dump", "--native")
    else:
        assert (
            "ranks 0-2: read with faulthandler, because py-spy is not installed on the node" in text
        )
    deploykit(capsys, "cancel", row["run"])
    deploykit(capsys, "wait", row["run"], code=143)
    kept = deploykit(capsys, "dump", "--json")
    assert kept["kept"]
    assert [group["ranks"] for group in kept["groups"]] == [[1], [0, 2]]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.nightly
def test_a_healthy_run_that_is_dumped_all_the_time_ends_the_same(
    project, capsys, tmp_path, without_spy, monkeypatch
):
    """By py-spy, by py-spy with native stacks, and by the program itself, in turn."""
    enough = tmp_path / "enough"
    settings = ("resources.processes_per_node=2", f"env.ENOUGH={enough}", without_spy)
    digests = []
    real = Path(sys.executable).with_name("py-spy")
    for dumps in (0, 9):
        row = submit(capsys, HEALTHY, *settings)
        records = Path(row["folder"], "exit_records")
        wait_for(lambda folder=records: len(list(folder.glob("process-*.json"))) == 2)
        tools = []
        while len(tools) < dumps:
            spy = None if len(tools) % 3 == 2 else str(real)
            monkeypatch.setattr(ranks, "_py_spy", lambda spy=spy: spy)
            words = ["--native"] if len(tools) % 3 == 1 else []
            found = deploykit(capsys, "dump", "--json", *words)
            if all("threads" in one and one["threads"] for one in found["ranks"]):
                tools.append(found["ranks"][0]["tool"])
        assert tools.count("faulthandler") == dumps // 3
        enough.touch()
        deploykit(capsys, "wait", row["run"], code=3)
        enough.unlink()
        digests.append(Path(row["output"], "digest").read_text())
    assert digests[0] == digests[1]


@pytest.fixture
def ended(tmp_path):
    """A run that has ended, and a function that keeps a dump in its folder."""
    folder = tmp_path / "run"
    (folder / "debug").mkdir(parents=True)
    row = registry.Run(
        "one", "one", "local", os.uname().nodename, str(folder), "a", "b", "", 1.0, "", "one"
    )
    registry.add(row)
    registry.update("one", Status(State.FAILED, "", "", 1))
    return lambda: write(folder / "stacks" / "1", node_data(rank(0, *NEXT), rank(1, *REDUCE)))


def test_a_run_that_has_ended_shows_what_was_kept(ended, capsys):
    text = deploykit(capsys, "dump", "one", code=66)
    assert "one has ended (failed), and no stacks were saved" in text
    ended()
    text = deploykit(capsys, "dump", "one")
    head = (
        "one: 2 ranks at 2026-11-23T07:20:01Z (the run has ended; these are the last saved stacks)"
    )
    assert text.startswith(f"{head}\n")


def test_what_the_flight_recorder_left_is_shown(ended, capsys, tmp_path):
    ended()
    (tmp_path / "run/debug/fr_0").write_bytes(b"\x80 no dump")
    text = deploykit(capsys, "dump", "one")
    assert "warning: " in text
    assert "fr_0 is not a valid dump of PyTorch's flight recorder" in text
