"""Starts the trainer, as `make gpu` measures it, and reads what it reports."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
ENTRYPOINTS = TOP / "entrypoints"
TRAINER = ENTRYPOINTS / "train.py"
_PATIENCE = 1800
_SHOWN = 3000
"""Characters of a failed program's errors."""
_NOT_PASSED_ON = ("DEPLOYKIT_", "PYTHON", "SLURM_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Machine:
    """What the measurements run on."""

    gpus: int
    """0: everything runs on the CPU."""
    ranks: int
    """At most."""
    facts: tuple[str, ...]
    """Versions and hardware, one a line."""
    gpu: str = ""
    """Name of the GPU, as the driver has it."""


@dataclass(frozen=True)
class Size:
    """A model, by default the trainer's GPT over bytes, and how it is trained."""

    name: str
    layers: int
    width: int
    heads: int
    sequence: int
    batch: int
    """Samples of a step on each rank."""
    steps: int
    task: str = "text"
    vocabulary: int | None = None
    """None: that of the task."""

    def words(self, ranks: int) -> list[str]:
        """The trainer's options; every step is logged."""
        shape = [f"--layers={self.layers}", f"--width={self.width}", f"--heads={self.heads}"]
        shape += [f"--task={self.task}", f"--sequence={self.sequence}"]
        if self.vocabulary is not None:
            shape.append(f"--task-option=vocabulary={self.vocabulary}")
        run = [f"--batch-size={self.batch * ranks}", f"--steps={self.steps}", "--epochs=100"]
        return [*shape, *run, "--no-tensorboard", "--log-every=1", "--checkpoint-every=100000"]


@dataclass(frozen=True)
class Result:
    """What a run reported; `error` is why it failed, in a line."""

    losses: dict[int, float]
    tokens_per_second: float = 0.0
    memory: float = 0.0
    """The most that a rank allocated, in bytes."""
    mfu: float | None = None
    error: str = ""

    def difference(self, other: Result) -> float:
        """The largest relative difference of the losses of the same steps; infinite if none."""
        common = self.losses.keys() & other.losses.keys()
        pairs = ((self.losses[step], other.losses[step]) for step in common)
        return max((abs(a - b) / abs(b) for a, b in pairs), default=float("inf"))


def machine(*, dry: bool) -> Machine:
    """The machine that runs this; with `dry`, without its GPUs."""
    import torch

    gpus = 0 if dry or not torch.cuda.is_available() else torch.cuda.device_count()
    facts = [f"Python {sys.version.split()[0]}, torch {torch.__version__}, {os.cpu_count()} CPUs"]
    if not gpus:
        return Machine(0, 4, tuple(facts))
    one = torch.cuda.get_device_properties(0)
    facts += [
        f"{gpus} x {one.name}, {one.total_memory / 2**30:.1f} GiB",
        f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
    ]
    return Machine(gpus, gpus, tuple(facts), one.name)


def environment(machine: Machine) -> dict[str, str]:
    """The variables of a program; a dry one sees no GPU."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
    hidden = {} if machine.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    paths = os.pathsep.join(map(str, (HERE, ENTRYPOINTS)))
    return {**inherited, **hidden, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def train(machine: Machine, size: Size, ranks: int, *words: str, program: Path = TRAINER) -> Result:
    """Train with options besides those of the size, on so many ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        env = environment(machine)
        env |= {f"DEPLOYKIT_{name}_DIR": str(folder / name) for name in ("OUTPUT", "CHECKPOINT")}
        argv = [str(program), *size.words(ranks), *words]
        done = torchrun(argv, ranks, env, folder)
        file = folder / "OUTPUT/metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
    if done.returncode != 0:
        print(" ".join(argv), done.stderr[-_SHOWN:], sep="\n", file=sys.stderr)
        return Result({}, error=reason(done.stdout + done.stderr))
    return _result([json.loads(line) for line in lines])


def torchrun(
    argv: Sequence[str], ranks: int, env: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a program on so many ranks of this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [sys.executable, *launcher, *argv],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE,
    )


def reason(text: str) -> str:
    """The line that tells why a program failed: that of its first error."""
    lines = [line.partition("]: ")[2] or line for line in text.splitlines()]
    wanted = (line.strip() for line in lines if re.search(r"(?<!Failed)Error: |: error: ", line))
    return next(wanted, "it failed without an error message")[:160]


def _result(lines: Sequence[dict[str, Any]]) -> Result:
    """What logged steps say; the first half of them is left out of the rates, as warm-up."""
    steps = [line for line in lines if "loss" in line]
    if not steps:
        return Result({}, error="it logged no step")
    late = steps[len(steps) // 2 :]
    rate = next(key for key in steps[-1] if key.endswith("_per_second") and "flops" not in key)
    mfu = [line["mfu"] for line in late if "mfu" in line]
    return Result(
        {line["step"]: line["loss"] for line in steps},
        statistics.median(line[rate] for line in late),
        max(line["memory_bytes"] for line in steps),
        statistics.median(mfu) if mfu else None,
    )
