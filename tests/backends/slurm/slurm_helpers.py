"""Helpers of the tests for Slurm: the command of the cluster, and waiting."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from deploykit.backends import slurm

CLUSTER = Path(__file__).parents[3] / "infra" / "slurm" / "cluster.py"

PATIENCE = 600
"""Seconds to wait for anything. Only a slow machine, or a failure, takes that long."""


def cluster_command(*words, **more):
    """Run ``infra/slurm/cluster.py`` as a user does."""
    argv = [sys.executable, str(CLUSTER), *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, **more)


def folder_of(run, tmp_path):
    """The folder of a run."""
    return tmp_path / "state folder" / "runs" / run


def output(*argv):
    """The standard output of a program that must succeed."""
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def wait_for(condition, seconds=PATIENCE, what=lambda: "not true"):
    """Poll until `condition()` is true, and return its value; else fail, and say `what()`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what()} within {seconds} s"
        time.sleep(0.05)
    return value


def ended(handle):
    """Wait until the job has ended; its final status."""

    def final():
        status = slurm.status([handle])[handle]
        return status if status.state.final else None

    return wait_for(final)
