"""What node 0 runs a job with, for `deploykit report`: versions, GPUs and their driver."""

from __future__ import annotations

import importlib.metadata
import os
import sys

from deploykit_node.observe import nvml
from deploykit_node.records import SoftwareRecord

_PACKAGES = ("torch", "numpy", "accelerate", "deepspeed", "lightning", "transformers")
"""Those whose version is told, where they are installed."""


def of(devices: nvml.Devices) -> SoftwareRecord:
    """Versions of this Python and its packages, and the GPUs that the ranks see."""
    versions = {"Python": sys.version.split()[0], os.uname().sysname: os.uname().release}
    versions |= {name: version for name in _PACKAGES if (version := _version(name))}
    return {"versions": versions, "gpus": devices.names(), "driver": devices.driver()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except Exception:  # noqa: BLE001 - what is broken there is no reason to end a run
        return None
