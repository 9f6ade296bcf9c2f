"""What the tests of the Slurm backend share: the cluster's command, and waiting."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from deploykit.backends import slurm

CLUSTER = Path(__file__).parents[2] / "infra" / "slurm" / "cluster.py"

PATIENCE = 600
"""Seconds to wait for anything: a slow machine needs them, and nobody else waits for long."""


def cluster_command(*words, **more):
    """Run infra's command as a user does."""
    argv = [sys.executable, str(CLUSTER), *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, **more)


def folder_of(run, tmp_path):
    return tmp_path / "state folder" / "runs" / run


def output(*argv):
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def wait_for(condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return value


def ended(handle):
    """The job's last status."""

    def final():
        status = slurm.status([handle])[handle]
        return status if status.state.final else None

    return wait_for(final)
