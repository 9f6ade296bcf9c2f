"""The properties of this node that can make a job fail: versions, memory, disks."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploykit_node.network import interfaces
from deploykit_node.preflight import line_rate

_DRIVER = Path("/proc/driver/nvidia/version")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_SHM = "/dev/shm"  # noqa: S108 - the kernel's own name
_FOLDERS = ("DEPLOYKIT_OUTPUT_DIR", "DEPLOYKIT_CHECKPOINT_DIR", "TMPDIR")


def collect(env: Mapping[str, str], route: interfaces.Route | None) -> dict[str, Any]:
    """The facts of this node, sizes in bytes. `route` leads to another node."""
    interface = route.interface if route else None
    return {
        "hostname": os.uname().nodename,
        "address": route.source if route else None,
        "interface": interface,
        "mtu": interfaces.mtu(interface) if interface else None,
        "line_rate": line_rate.of_node(interface),
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
    """The version of NCCL's package; without one, the group's processes report theirs."""
    return next((version for version in map(_version, _NCCL) if version), None)


def _driver() -> str | None:
    """NVIDIA's driver; the first line reads ``NVRM version: ... Kernel Module ... 570.86.15``."""
    try:
        match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _space(folder: str) -> list[int] | None:
    """Free and total bytes."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return [usage.free, usage.total]


def _disks(env: Mapping[str, str]) -> dict[str, list[int]]:
    """Space where the job writes, by folder; an s3:// prefix has none."""
    folders = sorted({env.get(name) or "/tmp" for name in _FOLDERS})  # noqa: S108 - as tempfile does
    spaces = {folder: _space(folder) for folder in folders if folder.startswith("/")}
    return {folder: space for folder, space in spaces.items() if space}
