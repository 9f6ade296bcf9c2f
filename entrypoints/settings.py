"""Variables for NCCL, PyTorch and libfabric: few, each with its reason. What is set already stays.

What NVIDIA calls debugging variables, and what has no effect any more, is in none of them:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import private
from cluster import BadEnvironment

VARIABLE = "DEPLOYKIT_DEBUG"
FOLDER = "debug"
"""Folder in the run's (on SageMaker: in the output's) that holds the files of `settings`."""

_RECORDS = "2000"
_NEW_NAMES = (2, 9)
"""PyTorch from which the flight recorder's variables begin with TORCH_FR."""


class Setting(NamedTuple):
    """A variable, its value, and the reason for it."""

    name: str
    value: str
    why: str


class Machine(NamedTuple):
    """What of this node decides."""

    gpus: bool
    efa: bool
    torch: tuple[int, int]


def machine(root: Path = Path("/")) -> Machine:
    """What the kernel's files, which begin at `root`, say of this node."""
    drivers = (root / "sys/class/infiniband").glob("*/device/driver")
    efa = any(driver.resolve().name == "efa" for driver in drivers)
    return Machine((root / "proc/driver/nvidia/version").exists(), efa, _torch())


def _torch() -> tuple[int, int]:
    """PyTorch's version; the newest, as far as that counts here, where it cannot be told."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        found = None
    return (int(found[1]), int(found[2])) if found else _NEW_NAMES


def choose(here: Machine, env: Mapping[str, str], chosen: Mapping[str, str]) -> list[Setting]:
    """The settings for this node, without those that the user has `chosen`."""
    folder = _folder(env)
    wanted = list(_recorder(here, folder)) if here.gpus or env.get(VARIABLE) else []
    if env.get(VARIABLE):
        wanted += _debug(folder)
    elif here.gpus:
        wanted.append(Setting("NCCL_DEBUG", "WARN", "NCCL says what goes wrong, and no more"))
    if here.efa:
        why = "with huge pages a data loader's fork fails: Cannot allocate memory"
        wanted.append(Setting("FI_EFA_USE_HUGE_PAGE", "0", why))
    return [setting for setting in wanted if setting.name not in chosen]


def _folder(env: Mapping[str, str]) -> Path | None:
    """The folder for what processes write of themselves; None where there is no place for it."""
    place = env.get("DEPLOYKIT_RUN_DIR") or env.get("DEPLOYKIT_OUTPUT_DIR") or ""
    return Path(place, FOLDER) if place and "://" not in place else None


def _recorder(here: Machine, folder: Path | None) -> Iterator[Setting]:
    """PyTorch's flight recorder, under the names of its version."""
    new = here.torch >= _NEW_NAMES
    size = "TORCH_FR_BUFFER_SIZE" if new else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    place = "TORCH_FR_DUMP_TEMP_FILE" if new else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    yield Setting(size, _RECORDS, "the last collectives of each rank are kept in memory")
    why = "and written down when one of them times out"
    yield Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", why)
    if folder is not None:
        yield Setting(place, f"{folder}/fr_", "a file for each rank, for `torchfrtrace`")


def _debug(folder: Path | None) -> Iterator[Setting]:
    """What `submit --debug` adds."""
    yield Setting("NCCL_DEBUG", "INFO", "NCCL says what it chooses")
    why = "of interfaces, connections and variables, not of every operation"
    yield Setting("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,NET,ENV", why)
    if folder is not None:
        why = "a file for each process (%h: host, %p: process)"
        yield Setting("NCCL_DEBUG_FILE", f"{folder}/nccl.%h.%p.log", why)
    yield Setting("TORCH_CPP_LOG_LEVEL", "INFO", "c10d says how the ranks meet")
    yield Setting("TORCH_DISTRIBUTED_DEBUG", "INFO", "and what each group is made of")
    yield Setting("LOGLEVEL", "INFO", "torchrun's agent says what it does")


def prepare(env: Mapping[str, str]) -> None:
    """Make the folder that the settings name. Raises BadEnvironment where it cannot be made."""
    folder = _folder(env)
    if folder is not None:
        try:
            private.folder(folder)
        except OSError as error:
            raise BadEnvironment(f"{folder} cannot be made here: {error.strerror}") from None
