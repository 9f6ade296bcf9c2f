"""Running the trainer for real: ranks started with torchrun's variables, or by torchrun itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector

ENTRYPOINTS = Path(__file__).resolve().parents[2] / "entrypoints"
sys.path[:0] = [str(ENTRYPOINTS), str(Path(__file__).resolve().parents[1])]

from ports import free_port  # noqa: E402 - found only now

import train  # noqa: E402
from trainer import checkpoint, group  # noqa: E402

TRAIN = str(ENTRYPOINTS / "train.py")
MEASURED = ("_seconds", "_second", "_bytes")
PATIENCE = 600
"""Seconds until processes are given up: a slow machine needs many."""
FOUR_EPOCHS = ("--epochs", "4", "--log-every", "1", "--no-tensorboard")


def environment(folder, **more):
    """The caller's, less what a launcher around the tests may have set; places inside `folder`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DEPLOYKIT_", "TORCHELASTIC"))}
    ours = {
        "DEPLOYKIT_OUTPUT_DIR": str(folder / "output"),
        "DEPLOYKIT_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ENTRYPOINTS),
    }
    return kept | ours | more


def start(command, folder, stdout=subprocess.PIPE, **more):
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment(folder, **more),
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_ranks(folder, world, *command):
    """`command` once for each rank, with the variables that torchrun would set."""
    port = str(free_port())
    return [
        start(
            command,
            folder,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(world)
    ]


def hit(folder, *, rank, step, by):
    """A program that is train.py, of which one rank sends itself the signal `by` after a step.

    In the first attempt only. Whether to stop is asked at every step, so that nothing depends on
    how fast the machine is.
    """
    program = folder / "hit.py"
    program.write_text(f"""
import os, train
from trainer import group

learn = train.Run.learn
group.PERIOD = 1e-9

def hit(run, *arguments):
    learn(run, *arguments)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if (run.place.rank, run.step, attempt) == ({rank}, {step}, "0"):
        os.kill(os.getpid(), {int(by)})

train.Run.learn = hit
train.main()
""")
    return str(program)


def outputs(processes, code=0):
    """What each process printed; all of them must end with `code`."""
    try:
        texts = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * len(processes), texts
    return texts


def train_ranks(folder, world, *arguments):
    """Train on `world` ranks to the end; what rank 0 printed."""
    return outputs(start_ranks(folder, world, TRAIN, *arguments))[0]


def train_alone(folder, *arguments):
    """Train in this very process, a group of one: the same numbers, without the start-up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    place = group.join()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "OUTPUT", folder / "output")
            patch.setattr(train, "CHECKPOINTS", folder / "checkpoints")
            train.Run(train.parse(["--strategy", "single", *arguments]), place, notices=[]).train()
    finally:
        group.leave()
        torch.set_num_threads(threads)


def lines(folder):
    """What was recorded, less the times, the memory and what follows from them."""
    return [
        {name: number for name, number in line.items() if not name.endswith(MEASURED)}
        for line in all_lines(folder)
    ]


def all_lines(folder):
    text = (folder / "output" / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def losses(folder):
    return {line["step"]: line["loss"] for line in lines(folder) if "loss" in line}


def weights(folder):
    """The final model, flat."""
    state = checkpoint.read(newest(folder))
    return parameters_to_vector(state[name] for name in sorted(state) if name.startswith("model."))


def newest(folder):
    """The newest checkpoint's folder."""
    return max((folder / "checkpoints").glob("step-????????"))


def saved_step(folder):
    return json.loads((newest(folder) / "whole.json").read_text())["progress"]["step"]
