"""Runs the trainer in real processes, started with torchrun's variables or by torchrun."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch.nn.utils import parameters_to_vector

import train
from tests.ports import free_port
from trainer.checkpoint import checkpointer as checkpoint
from trainer.parallel import process_group

CHECKOUT = Path(__file__).resolve().parents[2]
ENTRYPOINTS = CHECKOUT / "entrypoints"
TRAIN = str(ENTRYPOINTS / "train.py")
MEASURED = ("_seconds", "_second", "_bytes")
PATIENCE = 600
"""Timeout in seconds, for slow machines."""
FOUR_EPOCHS = ("--epochs", "4", "--log-every", "1", "--no-tensorboard")


def environment(folder, **more):
    """The caller's environment without a launcher's variables, with output folders in `folder`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DEPLOYKIT_", "TORCHELASTIC"))}
    own = {
        "DEPLOYKIT_OUTPUT_DIR": str(folder / "output"),
        "DEPLOYKIT_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ENTRYPOINTS}:{CHECKOUT}",
    }
    return kept | own | more


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


class ForkedRank:
    """A rank of `start_ranks`, with what `outputs` needs of a `subprocess.Popen`."""

    def __init__(self, program, log):
        self._program, self._log = program, log

    def communicate(self, timeout):
        self._program.wait(timeout)
        self._log.seek(0)
        text, _, code = self._log.read().rpartition("\n")
        self.returncode = self._program.returncode or int(code)
        return text, None

    def kill(self):
        if self._program.poll() is None:
            os.killpg(self._program.pid, signal.SIGKILL)
        self._log.close()


def start_ranks(folder, world, *command, **more):
    """Start `command` once per rank, with the variables that torchrun would set, and `more`."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [tempfile.TemporaryFile("w+") for _ in range(world)]  # noqa: SIM115 - closed by `kill`
    files = [log.fileno() for log in logs]
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.fork_ranks", *map(str, files), "--", *command],
        cwd=folder,
        env=environment(folder, **variables, **more),
        pass_fds=files,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=logs[0],
    )
    return [ForkedRank(program, log) for log in logs]


def train_with_signal(folder, *, rank, step, number):
    """A program like train.py in which one rank sends itself a signal after a step.

    Only in the first attempt. The ranks vote at every step, so that the result does not depend on
    the speed of the machine.
    """
    program = folder / "train_with_signal.py"
    program.write_text(f"""
import os, train
from trainer import stop_vote

train_step = train.Trainer.train_step
stop_vote.INTERVAL = 1e-9

def train_step_with_signal(trainer, *arguments):
    train_step(trainer, *arguments)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if (trainer.context.rank, trainer.step, attempt) == ({rank}, {step}, "0"):
        os.kill(os.getpid(), {int(number)})

train.Trainer.train_step = train_step_with_signal
train.main()
""")
    return str(program)


def outputs(processes, code=0):
    """The output of each process; all must exit with `code`."""
    try:
        texts = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * len(processes), texts
    return texts


def train_alone(folder, *arguments):
    """Train in this process, a group of one: the same results without the start-up time."""
    context = process_group.join()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "OUTPUT_DIR", folder / "output")
            patch.setattr(train, "CHECKPOINT_DIR", folder / "checkpoints")
            train.Trainer(
                train.parse(["--strategy", "single", *arguments]), context, stop_signals=[]
            ).train()
    finally:
        process_group.leave()


def call(module, checkpoints, output, *more):
    """Run evaluate.py or export.py in this process."""
    with pytest.MonkeyPatch.context() as patch:
        words = [f"{module.__name__}.py", str(checkpoints), "--output", str(output), *more]
        patch.setattr(sys, "argv", words)
        module.main()


def lines(folder):
    """The logged metrics without times, memory and what derives from them."""
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
    """The final weights as one vector."""
    state = checkpoint.read(latest(folder))
    return parameters_to_vector(state[name] for name in sorted(state) if name.startswith("model."))


def latest(folder):
    """The path of the latest checkpoint."""
    return max((folder / "checkpoints").glob("step-????????"))


def saved_step(folder):
    return json.loads((latest(folder) / "whole.json").read_text())["progress"]["step"]
