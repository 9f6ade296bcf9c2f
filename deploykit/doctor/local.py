"""Doctor for the local backend: PyTorch, GPUs, shared memory, limits and network of this host."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploykit.job import machine as hardware
from deploykit.job.decode import decode, read_json
from deploykit.job.model import JobSpec
from deploykit.lib import paths, shell, units
from deploykit.lib.errors import BackendUnavailable, NotFound
from deploykit.lib.finding import Finding, Fix

FILE = "machine.json"
_SHM = "/dev/shm"  # noqa: S108 - where PyTorch shares tensors
_SHM_PER_RANK = 256 * 1024**2
"""Bytes of shared memory that one rank with a few loader workers usually takes."""
_FILES_PER_RANK = 64
"""Open files of one rank, in addition to one connection to each other rank."""
_THREADS_PER_RANK = 128
_TIMEOUT = 120

_PROBE = """
import json, socket, sys
sys.path.insert(0, sys.argv[1])
from deploykit_node.network import interfaces
try:
    address = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
except OSError:
    address = ""
up = [name for _, name in socket.if_nameindex() if interfaces.is_up(name)]
facts = {"interfaces_up": up, "host_address": address}
facts |= {"torch": "", "cuda": "", "visible_gpus": 0, "import_error": ""}
try:
    import torch
    facts.update(torch=torch.__version__, cuda=torch.version.cuda or "")
    facts["visible_gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
except Exception as error:
    facts["import_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(facts))
"""
"""Runs under the trainer's Python and uses the node plane's own `network` module."""


@dataclass(frozen=True)
class LocalMachine:
    """Facts of this host. Sizes are in bytes; a limit of -1 means unlimited."""

    python: str
    torch: str
    cuda: str
    import_error: str
    """Why PyTorch cannot be imported; empty if it can."""
    visible_gpus: int
    """GPUs that PyTorch can use."""
    gpus: int | None
    """GPUs that `job.machine` counts, as for `check`; None where it cannot know."""
    shm_free: int
    """Free bytes of /dev/shm; 0 if it is missing."""
    max_open_files: int
    max_processes: int
    max_locked_memory: int
    has_infiniband: bool
    interfaces_up: tuple[str, ...]
    host_address: str
    """The address that the host's own name resolves to; empty if it does not resolve."""


def inspect(python: str | None) -> LocalMachine:
    """Collect the facts of this host with the trainer's Python (default: the running one).

    Raises BackendUnavailable if that Python cannot be run.
    """
    python = python or sys.executable
    argv = [python, "-c", _PROBE, str(paths.shipped("entrypoints"))]
    done = shell.run(argv, timeout=_TIMEOUT)
    if done.code:
        last = done.err.strip().splitlines()[-1:] or ["no output"]
        hint = "correct local.python, or recreate the environment"
        raise BackendUnavailable(f"{python} failed: {last[0]}", hint=hint)
    try:
        probed = json.loads(done.out.splitlines()[-1])  # a sitecustomize may print before it
    except (IndexError, ValueError):
        message = f"{python} exited with code 0 but printed no facts"
        raise BackendUnavailable(message, hint="correct local.python") from None
    return LocalMachine(
        **{**probed, "interfaces_up": tuple(probed["interfaces_up"])},
        python=python,
        gpus=hardware.gpus(hardware.visible({})),
        shm_free=shutil.disk_usage(_SHM).free if Path(_SHM).is_dir() else 0,
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        max_processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        max_locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        has_infiniband=Path("/dev/infiniband").is_dir(),
    )


def save(machine: LocalMachine, folder: Path) -> None:
    """Write the facts to ``machine.json`` in `folder`, for `load`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(machine), indent=1) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")


def load(folder: Path) -> LocalMachine:
    """Read what `save` wrote. Raises NotFound if it is missing or malformed."""
    path = folder / FILE
    hint = "create it with `deploykit doctor --backend local --save FOLDER`"
    try:
        machine, problems = decode(LocalMachine, read_json(path))
    except (OSError, ValueError) as error:
        raise NotFound(f"no valid facts in {path}", hint=hint) from error
    if machine is None:
        raise NotFound(f"{path}: {problems[0].path} {problems[0].message}", hint=hint)
    return machine


def findings(job: JobSpec, machine: LocalMachine) -> Iterator[Finding]:
    """Everything that would stop or slow a local run of the job. Pure."""
    yield from _pytorch(machine)
    yield from _gpus(job, machine)
    yield from _shared_memory(job, machine)
    yield from _limits(job, machine)
    yield from _network(job, machine)


def _pytorch(machine: LocalMachine) -> Iterator[Finding]:
    if machine.import_error:
        summary = "install PyTorch in that environment, or set local.python to another Python"
        yield Finding(
            "torch_missing",
            "error",
            "the trainer's Python cannot import PyTorch",
            (f"{machine.python}: {machine.import_error}",),
            Fix(summary, cli=_pip(machine, "torch")),
        )


def _pip(machine: LocalMachine, *words: str) -> str:
    return f"{shell.command(machine.python, '-m', 'pip', 'install', *words)}\n"


def _gpus(job: JobSpec, machine: LocalMachine) -> Iterator[Finding]:
    if machine.gpus is None:
        return
    if machine.torch and machine.visible_gpus < machine.gpus:
        build = f"built for CUDA {machine.cuda}" if machine.cuda else "built without CUDA"
        summary = (
            "install a build of PyTorch that the driver supports; `nvidia-smi` shows its CUDA "
            "version"
        )
        yield Finding(
            "gpus_unused",
            "error" if job.resources.gpus_per_node else "warning",
            f"this host has {units.plural(machine.gpus, 'GPU')}, but PyTorch can use "
            f"{machine.visible_gpus}",
            (f"PyTorch {machine.torch}, {build}",),
            Fix(summary, cli=_pip(machine, "--force-reinstall", "torch")),
        )
    requested = job.resources.gpus_per_node
    if requested > machine.gpus:
        yield Finding(
            "gpus_too_few",
            "warning",
            f"the job requests {units.plural(requested, 'GPU')} per node, but this host has "
            f"{machine.gpus}; ranks without a GPU train on the CPU",
            (f"usable GPUs: {machine.gpus}",),
            Fix("request fewer GPUs", settings={"resources.gpus_per_node": str(machine.gpus)}),
        )


def _shared_memory(job: JobSpec, machine: LocalMachine) -> Iterator[Finding]:
    ranks = job.resources.world_size
    free, usual = units.memory(machine.shm_free), units.memory(_SHM_PER_RANK * ranks)
    if machine.shm_free < _SHM_PER_RANK * ranks:
        yield Finding(
            "shm_small",
            "warning",
            f"{_SHM} has {free} free, usually too little for {units.plural(ranks, 'rank')} with "
            "data loader workers; a full /dev/shm kills them with a bus error",
            (f"{_SHM}: {free} free, {usual} usually needed",),
            Fix(
                "increase its size (in Docker: --shm-size=8g)",
                cli=f"mount -o remount,size=8G {_SHM}\n",
            ),
        )


def _limits(job: JobSpec, machine: LocalMachine) -> Iterator[Finding]:
    ranks = job.resources.world_size
    for name, flag, limit, needed in (
        ("open files", "-n", machine.max_open_files, _FILES_PER_RANK + ranks),
        ("processes and threads", "-u", machine.max_processes, _THREADS_PER_RANK * ranks),
    ):
        if 0 <= limit < needed:
            yield Finding(
                "limit",
                "error",
                f"the limit on {name} is {limit}; {ranks} ranks need about {needed}",
                (f"ulimit {flag}: {limit}",),
                Fix(
                    "raise the limit in the shell that you submit from",
                    cli=f"ulimit {flag} {needed * 4}\n",
                ),
            )
    if machine.has_infiniband and machine.max_locked_memory >= 0:
        yield Finding(
            "memlock",
            "error",
            "InfiniBand needs unlimited locked memory; otherwise ibv_reg_mr fails",
            (f"ulimit -l: {machine.max_locked_memory // 1024} KiB", "/dev/infiniband exists"),
            Fix("remove the limit (in Docker: --ulimit memlock=-1)", cli="ulimit -l unlimited\n"),
        )


def _network(job: JobSpec, machine: LocalMachine) -> Iterator[Finding]:
    if "lo" not in machine.interfaces_up:
        yield Finding(
            "loopback_down",
            "error",
            "the loopback interface is down; local ranks communicate over it",
            (f"active interfaces: {', '.join(machine.interfaces_up) or 'none'}",),
            Fix("bring it up", cli="ip link set lo up\n"),
        )
    if not machine.host_address and job.resources.world_size > 1:
        yield Finding(
            "host_name",
            "note",
            "this host's name does not resolve; Gloo prints a warning and uses loopback",
            ("getaddrinfo fails for the host's own name",),
            Fix("add the host name to /etc/hosts"),
        )
