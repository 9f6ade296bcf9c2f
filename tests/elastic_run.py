"""A job that loses a node and gets it back: its script, and what the script left.

The script adds up the numbers of its steps, each once, and waits in two places: at step 12 until a
node is lost, and at step 22 until it has come back. While it waits it saves checkpoints. A node
that comes back before the others have formed a group without it joins at once.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from deploykit.job.model import State
from deploykit.run import registry
from deploykit.run import state as run_state

STEPS = 30
EVERY = 5
SCRIPT = f"""
import json, os, signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
import torch
import torch.distributed as dist
from pathlib import Path

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
restart = int(os.environ["DEPLOYKIT_RESTART_COUNT"])
saved = Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"], "state.json")
step, total = json.loads(saved.read_text()) if saved.exists() else (0, 0)
HOLDS = {{0: 12, 1: 22}}

def save():
    scratch = saved.with_suffix(".tmp")
    scratch.write_text(json.dumps([step, total]))
    scratch.replace(saved)

def said(name, value):
    with open(Path(os.environ["DEPLOYKIT_OUTPUT_DIR"], name), "a") as file:
        file.write(json.dumps(value) + "\\n")

if rank == 0:
    said("groups.jsonl", [restart, world, os.environ["DEPLOYKIT_FULL_WORLD_SIZE"]])
while step < {STEPS}:
    stops = torch.tensor([len(stop)])
    dist.all_reduce(stops)
    missing = int(os.environ["DEPLOYKIT_FULL_WORLD_SIZE"]) - world
    if HOLDS.get(restart) == step and (missing or restart == 0):
        time.sleep(0.1)
    else:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        step, total = step + 1, total + (step + 1) * int(ones.item() == world)
    if rank == 0:
        said("steps.jsonl", [restart, step])
        if restart or step % {EVERY} == 0:
            save()
    if stops.item():
        dist.destroy_process_group()
        sys.exit(75)
if rank == 0:
    said("total.json", total)
dist.destroy_process_group()
"""

LOST_AND_BACK = ([[0, 3, 3], [1, 2, 3], [2, 3, 3]], [[0, 3, 3], [1, 3, 3]])
"""The groups of a run that loses one of three nodes, which comes back later or at once."""


def groups(folder: Path) -> list[list[int]]:
    """The restarts so far, with their ranks and those of all nodes."""
    return [[a, b, int(c)] for a, b, c in _lines(folder / "output/groups.jsonl")]


def steps(folder: Path) -> list[list[int]]:
    """Restart and number of each step, those that were held included."""
    return _lines(folder / "output/steps.jsonl")


def total(folder: Path) -> int:
    """The sum of the numbers of all steps."""
    return _lines(folder / "output/total.json")[0]


def launcher(folder: Path, node: int) -> int:
    """The process of the launcher of a node, of the run with this folder."""
    wanted = {f"DEPLOYKIT_RUN_DIR={folder}"}
    names = {f"{name}={node}" for name in ("DEPLOYKIT_NODE_RANK", "DEPLOYKIT_STEP_NODE")}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = [*(process / "cmdline").read_bytes().decode().split("\0"), ""]
            variables = set((process / "environ").read_bytes().decode().split("\0"))
        except (OSError, UnicodeDecodeError):
            continue
        starts = words[1].endswith(".deploykit/launch.py") and words[2:3] == ["torchrun"]
        if starts and wanted <= variables and names & variables:
            return int(process.name)
    raise AssertionError(f"no launcher of node {node} runs")


def lose(folder: Path, node: int) -> None:
    """Kill the launcher of a node."""
    os.kill(launcher(folder, node), signal.SIGKILL)


def final(run: str, seconds: float = 600):
    """The row of a run once it has ended."""
    end = time.monotonic() + seconds
    while not State((row := run_state.refresh([registry.get(run)])[0]).state).final:
        assert time.monotonic() < end, row
        time.sleep(0.2)
    return row


def _lines(path: Path) -> list:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
