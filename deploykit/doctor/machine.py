"""The machine of the local backend: PyTorch, GPUs, shared memory, limits, network."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit import parsing, paths, quoting, shell
from deploykit.decode import decode
from deploykit.doctor.finding import Finding, Fix
from deploykit.errors import BackendUnavailable, NotFound
from deploykit.model import JobSpec

FILE = "machine.json"
_SHM = "/dev/shm"  # noqa: S108 - where PyTorch shares tensors
_SHM_EACH = 256 * 1024**2
"""Bytes of shared memory that one rank with a few loader workers takes as a rule."""
_FILES_EACH = 64
"""Open files of one rank, beside one connection to each other rank."""
_THREADS_EACH = 128
_PATIENCE = 120

_CHILD = """
import json, socket, sys
sys.path.insert(0, sys.argv[1])
from deploykit_node.network import interfaces
try:
    own = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
except OSError:
    own = ""
up = [name for _, name in socket.if_nameindex() if interfaces.is_up(name)]
told = {"up": up, "own_address": own, "torch": "", "cuda": "", "sees": 0, "trouble": ""}
try:
    import torch
    told.update(torch=torch.__version__, cuda=torch.version.cuda or "")
    told["sees"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
except Exception as error:
    told["trouble"] = f"{type(error).__name__}: {error}"
print(json.dumps(told))
"""
"""Runs under the trainer's Python, with the node plane's own idea of the network."""


@dataclass(frozen=True)
class Machine:
    """What there is; sizes in bytes, -1 for a limit that is none."""

    python: str
    torch: str
    cuda: str
    trouble: str
    """Why PyTorch cannot be imported."""
    sees: int
    """GPUs that PyTorch can use."""
    cards: tuple[str, ...]
    """GPUs that the driver lists."""
    shm: int
    """Free bytes of /dev/shm; 0 where it is missing."""
    files: int
    threads: int
    locked: int
    rdma: bool
    up: tuple[str, ...]
    """Interfaces that are up."""
    own_address: str
    """What the host's own name resolves to, or nothing."""


def read(python: str | None) -> Machine:
    """Look at this machine, with the trainer's Python. Raises BackendUnavailable without one."""
    python = python or sys.executable
    argv = [python, "-c", _CHILD, str(paths.shipped("entrypoints"))]
    done = shell.run(argv, timeout=_PATIENCE)
    if done.code:
        said = done.err.strip().splitlines()[-1:] or ["it says nothing"]
        raise BackendUnavailable(
            f"{python} does not work: {said[0]}", hint="correct local.python, or make it anew"
        )
    told = _told(done.out, python)
    return Machine(
        python=python,
        torch=told["torch"],
        cuda=told["cuda"],
        trouble=told["trouble"],
        sees=told["sees"],
        cards=tuple(_cards()),
        shm=_free(_SHM),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        threads=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        rdma=Path("/dev/infiniband").is_dir(),
        up=tuple(told["up"]),
        own_address=told["own_address"],
    )


def _told(out: str, python: str) -> dict[str, Any]:
    """The last line of what the child printed; whatever starts up with a Python may print too."""
    try:
        return dict(parsing.json(out.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        raise BackendUnavailable(
            f"{python} does not work: it ran and told nothing", hint="correct local.python"
        ) from None


def save(machine: Machine, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(machine), indent=1) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")


def load(folder: Path) -> Machine:
    """What `save` wrote. Raises NotFound."""
    path = folder / FILE
    hint = "make it with `deploykit doctor --backend local --save FOLDER`"
    try:
        machine, problems = decode(Machine, parsing.json_of(path))
    except (OSError, ValueError) as error:
        raise NotFound(f"no facts in {path}", hint=hint) from error
    if machine is None:
        raise NotFound(f"{path}: {problems[0].path} {problems[0].message}", hint=hint)
    return machine


def check(job: JobSpec, machine: Machine) -> Iterator[Finding]:
    """Everything in the way of a local run. Pure."""
    yield from _pytorch(machine)
    yield from _gpus(job, machine)
    yield from _memory(job, machine)
    yield from _limits(job, machine)
    yield from _network(job, machine)


def _cards() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = shell.run(["nvidia-smi", "-L"], timeout=_PATIENCE)
    except BackendUnavailable:
        return []
    return [line.strip() for line in listed.out.splitlines() if line.startswith("GPU ")]


def _free(folder: str) -> int:
    try:
        there = os.statvfs(folder)
    except OSError:
        return 0
    return there.f_bavail * there.f_frsize


def _pytorch(machine: Machine) -> Iterator[Finding]:
    if machine.trouble:
        yield Finding(
            "torch_missing",
            "error",
            "the trainer's Python cannot import PyTorch",
            (f"{machine.python}: {machine.trouble}",),
            Fix(
                "install it there, or name another Python with local.python",
                cli=_pip(machine, "torch"),
            ),
        )


def _pip(machine: Machine, *words: str) -> str:
    return f"{quoting.command(machine.python, '-m', 'pip', 'install', *words)}\n"


def _gpus(job: JobSpec, machine: Machine) -> Iterator[Finding]:
    if machine.cards and machine.torch and machine.sees < len(machine.cards):
        built = f"built for CUDA {machine.cuda}" if machine.cuda else "built without CUDA"
        say = "install a build that the driver can run; `nvidia-smi` names its CUDA version"
        yield Finding(
            "gpus_unused",
            "error" if job.resources.gpus_per_node else "warning",
            f"the driver lists {len(machine.cards)} GPUs, and PyTorch can use {machine.sees}",
            (f"PyTorch {machine.torch}, {built}", *machine.cards[:1]),
            Fix(say, cli=_pip(machine, "--force-reinstall", "torch")),
        )
    wanted = job.resources.gpus_per_node
    if wanted > len(machine.cards):
        yield Finding(
            "gpus_too_few",
            "warning",
            f"the job asks for {wanted} GPUs on each node, and here are {len(machine.cards)}: "
            "ranks without one train on the CPU",
            tuple(machine.cards) or ("nvidia-smi lists none",),
            Fix("ask for fewer", settings={"resources.gpus_per_node": str(len(machine.cards))}),
        )


def _memory(job: JobSpec, machine: Machine) -> Iterator[Finding]:
    wanted = _SHM_EACH * job.resources.world_size
    if machine.shm < wanted:
        yield Finding(
            "shm_small",
            "warning",
            f"{_SHM} has {_size(machine.shm)} free, and {job.resources.world_size} ranks with "
            "loader workers take more as a rule: they die with a bus error when it is full",
            (f"{_SHM}: {_size(machine.shm)} free, {_size(wanted)} wanted",),
            Fix(
                "make it larger (in Docker: --shm-size=8g)",
                cli=f"mount -o remount,size=8G {_SHM}\n",
            ),
        )


def _size(count: int) -> str:
    return f"{count // 1024**2} MiB"


def _limits(job: JobSpec, machine: Machine) -> Iterator[Finding]:
    ranks = job.resources.world_size
    for name, flag, has, wanted in (
        ("open files", "-n", machine.files, _FILES_EACH + ranks),
        ("processes and threads", "-u", machine.threads, _THREADS_EACH * ranks),
    ):
        if 0 <= has < wanted:
            yield Finding(
                "limit",
                "error",
                f"the limit of {name} is {has}, and {ranks} ranks need about {wanted}",
                (f"ulimit {flag}: {has}",),
                Fix("raise it in the shell that submits", cli=f"ulimit {flag} {wanted * 4}\n"),
            )
    if machine.rdma and machine.locked >= 0:
        yield Finding(
            "memlock",
            "error",
            "InfiniBand needs locked memory without a limit: ibv_reg_mr fails otherwise",
            (f"ulimit -l: {machine.locked // 1024} KiB", "/dev/infiniband is there"),
            Fix("lift it (in Docker: --ulimit memlock=-1)", cli="ulimit -l unlimited\n"),
        )


def _network(job: JobSpec, machine: Machine) -> Iterator[Finding]:
    if "lo" not in machine.up:
        yield Finding(
            "loopback_down",
            "error",
            "the loopback interface is down, and local ranks meet on it",
            (f"interfaces that are up: {', '.join(machine.up) or 'none'}",),
            Fix("bring it up", cli="ip link set lo up\n"),
        )
    if not machine.own_address and job.resources.world_size > 1:
        yield Finding(
            "host_name",
            "note",
            "this host's own name does not resolve; Gloo then warns and takes loopback",
            ("getaddrinfo of the own name fails",),
            Fix("name it in /etc/hosts"),
        )
