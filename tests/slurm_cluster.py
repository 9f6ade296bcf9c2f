"""Fixtures: a real Slurm cluster of four nodes on this machine, shared by the whole session."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests import programs
from tests.backends.slurm.slurm_helpers import cluster_command, output, wait_for


@pytest.fixture(scope="session")
def needs_slurm():
    programs.need(*programs.SLURM)


@pytest.fixture
def box(needs_slurm):
    """A folder for a cluster, with a short path; the cluster is stopped after the test."""
    folder = Path(tempfile.mkdtemp(prefix="box-"))
    yield folder
    cluster_command("stop", folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def running_cluster(needs_slurm):
    folder = Path(tempfile.mkdtemp(prefix="box-"))
    done = cluster_command("start", folder)
    assert done.returncode == 0, done.stderr
    yield folder
    cluster_command("stop", folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(running_cluster, monkeypatch):
    """The running cluster without jobs, its nodes idle; Slurm's commands talk to it."""
    line = cluster_command("env", running_cluster).stdout
    name, _, value = line.removeprefix("export ").strip().partition("=")
    monkeypatch.setenv(name, shlex.split(value)[0])
    wait_for(all_idle)
    yield running_cluster
    subprocess.run(["scancel", "--me"], check=True)
    wait_for(lambda: not output("squeue", "--noheader"))


def all_idle():
    """Whether every node responds and runs nothing; some tests leave nodes that recover slowly."""
    return set(output("sinfo", "--noheader", "--Node", "--format=%T").split()) == {"idle"}
