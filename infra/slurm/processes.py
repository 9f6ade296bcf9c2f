"""Processes in /proc, for `cluster.py`. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path


def started(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def alive(pid: int, born: int) -> bool:
    """Whether the process `pid` that started at `born` (see `started`) is running."""
    return started(pid) == born


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal, unless the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def gone(pids: Sequence[int], seconds: float) -> bool:
    """Wait until all processes are gone; return whether they were within `seconds`."""
    deadline = time.monotonic() + seconds
    while any(started(pid) is not None for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def of_jobs(conf: Path) -> list[int]:
    """The slurmstepd processes of the cluster with this slurm.conf, and the processes of its jobs.

    A user's shell may have SLURM_CONF too, so that only slurmstepd and processes with
    SLURMD_NODENAME, which slurmd sets, count.
    """
    marker = f"SLURM_CONF={conf}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                is_of_slurm = (entry / "comm").read_text().strip() == "slurmstepd" or any(
                    variable.startswith(b"SLURMD_NODENAME=") for variable in variables
                )
                if is_of_slurm and marker in variables:
                    pids.append(int(entry.name))
    return pids
