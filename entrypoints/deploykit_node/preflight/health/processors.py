"""How many processors this node may use: fewer by its affinity, or by the limit of a cgroup."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from deploykit_node.preflight.health.record import Health

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NAME = "CPUs"


def check(health: Health) -> None:
    """Add the number of processors, which should be the same on all nodes."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    allowed = limit()
    health.counts[NAME] = usable or 1
    if math.isfinite(allowed):
        health.counts[NAME] = min(usable or 1, math.ceil(allowed))


def limit() -> float:
    """How many processors the cgroups of this process allow; infinite without a limit.

    https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max) and, of version 1,
    https://docs.kernel.org/scheduler/sched-bwc.html (cpu.cfs_quota_us).
    """
    limits = [math.inf]
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += (_of(folder / "cpu.max") for folder in _upwards(GROUPS, path))
        elif "cpu" in controllers.split(","):
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            for folder in _upwards(GROUPS / "cpu", path):
                limits.append(_of(*(folder / name for name in names)))
    return min(limits)


def _upwards(root: Path, path: str) -> list[Path]:
    """The folder of a group, and of those around it; in a container it may be `root` itself."""
    own = root / path.lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]


def _of(*files: Path) -> float:
    """Quota by period; infinite where a file is missing, or says ``max`` or -1."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (int(word) for file in files for word in file.read_text().split())
        if quota > 0 and period > 0:
            return quota / period
    return math.inf
