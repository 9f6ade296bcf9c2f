"""Processes, as /proc knows them. For `cluster.py`; standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path


def started(pid: int) -> int | None:
    """When a process began, in clock ticks after boot; None when it is dead or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def alive(pid: int, born: int) -> bool:
    return started(pid) == born


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def gone(pids: Sequence[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(started(pid) is not None for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def of_jobs(conf: Path) -> list[int]:
    """Every slurmstepd of the cluster with that slurm.conf, and what runs below it.

    A shell in which somebody evaluated ``env`` has SLURM_CONF as well: only Slurm's own daemons
    and processes that a slurmd started (they have SLURMD_NODENAME) count.
    """
    marker = f"SLURM_CONF={conf}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                ours = (entry / "comm").read_text().strip() == "slurmstepd" or any(
                    variable.startswith(b"SLURMD_NODENAME=") for variable in variables
                )
                if ours and marker in variables:
                    found.append(int(entry.name))
    return found
