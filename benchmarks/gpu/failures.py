"""What `make gpu` runs besides the trainer: the hand-written loop, `advise`, failing programs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import runs
from runs import HERE, TOP, Machine, Size

HOME = Path(tempfile.gettempdir())
"""Where deploykit keeps the runs."""
_NUMBERS = itertools.count()
_SHOWN = 6000
"""Characters of the log of a failure that `diagnose` names otherwise."""
_AT_ONCE = 4
"""Failures at a time: each mostly starts Python and waits."""


class Failure(NamedTuple):
    """A program that fails, and the cause that `diagnose` must name."""

    name: str
    label: str
    text: str
    gpus: int = 0
    """How many it needs; 0: it runs without one."""
    processes: int = 2


_START = """\
import os, sys, time, torch, datetime
import torch.distributed as dist
rank = int(os.environ["RANK"])
"""
FAILURES = (
    Failure("an exception on rank 1", "user_code_error", 'if rank: raise ValueError("no")\n'),
    Failure("an oversized tensor", "cuda_oom", 'torch.empty(1 << 50, device="cuda")\n', 1, 1),
    Failure(
        "two ranks on one GPU",
        "duplicate_gpu",
        'dist.init_process_group("nccl")\ndist.all_reduce(torch.ones(1, device="cuda:0"))\n',
        1,
    ),
    Failure(
        "an index out of range in a kernel",
        "cuda_kernel_error",
        'one = torch.zeros(4, device="cuda")\nprint(one[torch.tensor([9], device="cuda")].cpu())\n',
        1,
        1,
    ),
    Failure("a missing GPU", "gpu_not_visible", "torch.cuda.set_device(31)\n", 1, 1),
    Failure(
        "CUDA in a forked worker",
        "user_code_error",
        'torch.zeros(1, device="cuda")\nfrom torch.utils.data import DataLoader\n'
        "next(iter(DataLoader([0], num_workers=1, collate_fn=lambda x: torch.ones(1).cuda())))\n",
        1,
        1,
    ),
    Failure(
        "a missing interface",
        "net_iface_wrong",
        'os.environ["NCCL_SOCKET_IFNAME"] = "nope0"\ndist.init_process_group("nccl")\n'
        'dist.all_reduce(torch.ones(1, device="cuda"))\n',
        1,
        1,
    ),
    Failure(
        "rank 0 does not set up NCCL",
        "nccl_init_timeout",
        'dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=10))\n'
        'time.sleep(60 * (rank == 0))\ndist.all_reduce(torch.ones(1, device="cuda:0"))\n',
        1,
    ),
    Failure(
        "rank 1 misses a collective",
        "collective_timeout",
        'torch.cuda.set_device(rank)\ndist.init_process_group("nccl", '
        "timeout=datetime.timedelta(seconds=20))\n"
        'one = torch.ones(1, device="cuda")\ndist.all_reduce(one)\ntime.sleep(90 * rank)\n'
        "dist.all_reduce(one)\ntorch.cuda.synchronize()\n",
        2,
    ),
)


def by_hand(machine: Machine, size: Size, *options: str) -> float:
    """Tokens a second of the hand-written loop; 0 if it failed, which is printed."""
    words = [*size.words(machine.ranks), *options]
    with tempfile.TemporaryDirectory() as folder:
        argv = [str(HERE / "by_hand.py"), *words]
        done = runs.torchrun(argv, machine.ranks, runs.environment(machine), Path(folder))
    for line in done.stdout.splitlines():
        if line.startswith('{"tokens_per_second"'):
            return float(json.loads(line)["tokens_per_second"])
    print(f"the hand-written loop: {runs.reason(done.stderr)}", file=sys.stderr)
    return 0.0


def predicted(machine: Machine, size: Size, gpu: str, strategy: str) -> float:
    """Bytes of a rank that `deploykit advise` predicts, without its reserve; 0 if it has none."""
    words = [f"--gpu={gpu}", f"--gpus-per-node={machine.ranks}", f"--task={size.task}", "--json"]
    words += [f"--layers={size.layers}", f"--width={size.width}", f"--heads={size.heads}"]
    words += [f"--sequence={size.sequence}", f"--batch-size={size.batch * machine.ranks}"]
    done = deploykit(machine, "advise", *words, "--checkpoint-activations=off")
    for one in json.loads(done.stdout or '{"candidates": []}')["candidates"]:
        if one["strategy"] == strategy:
            return float(one["bytes"]["total"] - one["bytes"].get("reserve", 0))
    return 0.0


def waits(machine: Machine, size: Size) -> str:
    """The error of a step that waits for the GPU; empty where none does."""
    words = [*size.words(machine.ranks), "--log-every=1000", "--strategy=ddp"]
    env = runs.environment(machine)
    with tempfile.TemporaryDirectory() as folder:
        env |= {"DEPLOYKIT_OUTPUT_DIR": folder, "DEPLOYKIT_CHECKPOINT_DIR": folder}
        argv = [str(HERE / "without_sync.py"), *words]
        done = runs.torchrun(argv, machine.ranks, env, Path(folder))
    return runs.reason(done.stdout + done.stderr) if done.returncode else ""


def diagnosed(machine: Machine) -> Iterator[tuple[str, str, str]]:
    """Each failure that fits this machine, the label expected, and the one that was found."""
    yield "none, with --preflight", "passed", _preflight(machine)
    fitting = [one for one in FAILURES if one.gpus <= machine.gpus]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        said = pool.map(partial(_label, machine), fitting)
        yield from ((one.name, one.label, label) for one, label in zip(fitting, said, strict=True))


def _preflight(machine: Machine) -> str:
    run, last = _submit(machine, Failure("", "", "pass\n", processes=machine.ranks), "--preflight")
    passed = "preflight: passed" in deploykit(machine, "logs", run, "--raw").stdout
    return "passed" if passed else f"failed: {last}"


def _label(machine: Machine, failure: Failure) -> str:
    """The first cause that `diagnose` names."""
    run, last = _submit(machine, failure)
    said = deploykit(machine, "diagnose", run, "--json").stdout
    answer: dict[str, Any] = json.loads(said or "{}")
    causes = answer.get("causes") or [{"cause": f"none: {last}"}]
    label = str(causes[0]["cause"])
    if label != failure.label:
        print(f"\n{failure.name}:", file=sys.stderr)
        print(deploykit(machine, "logs", run, "--raw").stdout[-_SHOWN:], file=sys.stderr)
    return label


def _submit(machine: Machine, failure: Failure, *words: str) -> tuple[str, str]:
    """Run a program on this machine to its end; its run id, and the last line of the command."""
    with tempfile.TemporaryDirectory() as folder:
        script, run = Path(folder, "fails.py"), f"gpu-{next(_NUMBERS)}"
        script.write_text(_START + failure.text)
        wanted = ["--run", run, "--wait", f"--set=resources.processes_per_node={failure.processes}"]
        if failure.gpus:
            wanted.append(f"--set=resources.gpus_per_node={failure.gpus}")
        done = deploykit(machine, "submit", str(script), *wanted, *words)
    return run, (done.stderr.strip().splitlines() or [""])[-1]


def deploykit(machine: Machine, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a verb of the launcher to its end."""
    env = {**runs.environment(machine), "DEPLOYKIT_HOME": str(HOME)}
    argv = [sys.executable, "-m", "deploykit", *words]
    return subprocess.run(
        argv, cwd=TOP, env=env, capture_output=True, text=True, check=False, timeout=900
    )
