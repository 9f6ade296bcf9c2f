"""Variables for NCCL, PyTorch and libfabric: a few, each with its reason.

Variables that are set already are kept. NVIDIA calls many others debugging aids, or they have no
effect any more: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from deploykit_node import environment, log, records
from deploykit_node.cluster import BadEnvironment, Environ

VARIABLE = "DEPLOYKIT_DEBUG"
FOLDER = "debug"
"""Folder for the files that these settings name, in the run folder (SageMaker: in the output)."""

_RECORDS = "2000"
_NEW_NAMES = (2, 9)
"""First PyTorch version whose flight recorder variables begin with TORCH_FR."""


class Setting(NamedTuple):
    """A variable, its value, and the reason for it."""

    name: str
    value: str
    why: str


class Machine(NamedTuple):
    """The properties of this node that decide."""

    gpus: bool
    efa: bool
    torch: tuple[int, int] | None = None
    """PyTorch's major and minor version; None: that of the installed one."""


def machine(root: Path = Path("/")) -> Machine:
    """The properties of this node, from the kernel's files below `root`."""
    drivers = (root / "sys/class/infiniband").glob("*/device/driver")
    efa = any(driver.resolve().name == "efa" for driver in drivers)
    return Machine((root / "proc/driver/nvidia/version").exists(), efa)


def _torch() -> tuple[int, int]:
    """PyTorch's version; `_NEW_NAMES` if it is unknown."""
    match = re.match(r"(\d+)\.(\d+)", environment.version("torch") or "")
    return (int(match[1]), int(match[2])) if match else _NEW_NAMES


def choose(here: Machine, env: Environ, kept: Mapping[str, str]) -> list[Setting]:
    """The settings for this node, without those that are in `kept` already."""
    folder = records.beside(env, FOLDER)
    wanted = list(_recorder(here, folder)) if here.gpus or env.get(VARIABLE) else []
    if env.get(VARIABLE):
        wanted += _debug(folder)
    elif here.gpus:
        wanted.append(Setting("NCCL_DEBUG", "WARN", "log errors only"))
    if here.efa:
        why = "with huge pages, forking data loader workers can fail"
        wanted.append(Setting("FI_EFA_USE_HUGE_PAGE", "0", why))
    return [setting for setting in wanted if setting.name not in kept]


def _recorder(here: Machine, folder: Path | None) -> Iterator[Setting]:
    """PyTorch's flight recorder, under the names of its version."""
    new = (here.torch or _torch()) >= _NEW_NAMES
    size = "TORCH_FR_BUFFER_SIZE" if new else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    path = "TORCH_FR_DUMP_TEMP_FILE" if new else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    yield Setting(size, _RECORDS, "keep the last collectives of each rank in memory")
    yield Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "write these to a file on a timeout")
    if folder is not None:
        yield Setting(path, f"{folder}/fr_", "one file per rank, for `torchfrtrace`")


def _debug(folder: Path | None) -> Iterator[Setting]:
    """What `submit --debug` adds."""
    yield Setting("NCCL_DEBUG", "INFO", "log NCCL's choices")
    why = "log interfaces, connections and variables, but not each operation"
    yield Setting("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,NET,ENV", why)
    if folder is not None:
        why = "one file per process (%h: host, %p: process)"
        yield Setting("NCCL_DEBUG_FILE", f"{folder}/nccl.%h.%p.log", why)
    yield Setting("TORCH_CPP_LOG_LEVEL", "INFO", "log how the ranks connect (c10d)")
    yield Setting("TORCH_DISTRIBUTED_DEBUG", "INFO", "log the members of each process group (c10d)")
    yield Setting("LOGLEVEL", "INFO", "log the steps of torchrun's agent")


def set_variables(env: dict[str, str], kept: Mapping[str, str], number: int) -> None:
    """Set the variables, except those in `kept`, and make the folder that they name.

    `number` is the node's or the rank's; number 0 logs each variable with its reason. Raises
    BadEnvironment if the folder cannot be made.
    """
    settings, folder = choose(machine(), env, kept), records.beside(env, FOLDER)
    if settings and folder is not None:
        try:
            records.make_folder(folder)
        except OSError as error:
            raise BadEnvironment(f"{folder} cannot be created here: {error.strerror}") from None
    for name, value, why in settings:
        env[name] = value
        if number == 0:
            log.say(0, f"setting {name}={value}: {why}")
