"""Where a rank's program writes the profile that the job asks for (``DEPLOYKIT_PROFILE``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deploykit_node.observe import faults

FOLDER = "profile"
"""Folder of the traces in the run folder (SageMaker: in the output)."""
REPORT = ".nsys-rep"
"""Suffix of reports of Nsight Systems."""


def file(env: Mapping[str, str], name: str) -> Path | None:
    """Where a file of a profile goes; None without a folder for it."""
    parent = env.get("DEPLOYKIT_RUN_DIR") or env.get("DEPLOYKIT_OUTPUT_DIR") or ""
    return Path(parent, FOLDER, name) if parent and "://" not in parent else None


def by_nsys(env: Mapping[str, str]) -> bool:
    """Whether the job asks for Nsight Systems."""
    return env.get("DEPLOYKIT_PROFILE", "").partition(":")[0] == "nsys"


def environment(env: dict[str, str], rank: int) -> dict[str, str]:
    """The variables of a program, with the hook that profiles it where the job asks for that.

    A trace of an earlier attempt is kept, and not taken again; a snapshot of memory is replaced.
    """
    kind, _, steps = env.get("DEPLOYKIT_PROFILE", "").partition(":")
    suffix = {"memory": ".memory.pickle", "torch": ".trace.json.gz", "nsys": REPORT}.get(kind)
    path = file(env, f"rank-{rank}{suffix}") if suffix else None
    if path is None or (kind == "nsys" and not steps) or (kind != "memory" and path.exists()):
        return env
    return faults.hooked(env, "DEPLOYKIT_TRACE_FILE", path)
