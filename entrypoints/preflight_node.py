"""What this node is made of, as far as a job can fail by it: versions, memory, disks."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import network

_DRIVER = Path("/proc/driver/nvidia/version")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_SHM = "/dev/shm"  # noqa: S108 - the kernel's own name
_FOLDERS = ("DEPLOYKIT_OUTPUT_DIR", "DEPLOYKIT_CHECKPOINT_DIR", "TMPDIR")


def facts(env: Mapping[str, str], way: network.Route | None) -> dict[str, Any]:
    """Facts of this node; sizes in bytes. `way` is its route to another node."""
    interface = way.interface if way else None
    return {
        "hostname": os.uname().nodename,
        "address": way.source if way else None,
        "interface": interface,
        "mtu": network.mtu(interface) if interface else None,
        "versions": {"driver": _driver(), "torch": _version("torch"), "NCCL": _nccl()},
        "shm": _space(_SHM),
        "disks": _disks(env),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl() -> str | None:
    """NCCL's package, where PyTorch came with one; else the group's processes will say."""
    return next((found for found in map(_version, _NCCL) if found), None)


def _driver() -> str | None:
    """NVIDIA's driver; the first line reads ``NVRM version: ... Kernel Module ... 570.86.15``."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _space(folder: str) -> list[int] | None:
    """Free and total bytes."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return [usage.free, usage.total]


def _disks(env: Mapping[str, str]) -> dict[str, list[int]]:
    """Space where the job writes. An address (s3://...) has none."""
    places = sorted({env.get(name) or "/tmp" for name in _FOLDERS})  # noqa: S108 - as tempfile does
    found = {place: _space(place) for place in places if place.startswith("/")}
    return {place: space for place, space in found.items() if space}
