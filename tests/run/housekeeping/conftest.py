"""Runs that have been sent, as if some days ago."""

from __future__ import annotations

import fcntl
import os

import pytest

from deploykit.backends import base as backend
from deploykit.bundle import archive as bundle
from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.run import registry
from tests.run.housekeeping.state import DAY

LIMIT = 1 << 30


@pytest.fixture
def source(tmp_path):
    """A source of files in folders, one of them executable, and a link."""
    folder = tmp_path / "src"
    (folder / "package/data").mkdir(parents=True)
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "start.sh").write_text("exec true\n")
    (folder / "start.sh").chmod(0o755)
    (folder / "package/data/table.csv").write_text("a,b\n" * 10_000)
    (folder / "package/config.json").write_text("{}\n")
    (folder / "latest").symlink_to("package/config.json")
    return folder


@pytest.fixture
def add(source):
    """A run of that source with an unpacked copy, as if it had been sent `days` ago.

    One that has not ended holds its lock, as its shell would.
    """
    held = []

    def one(name, state=State.SUCCEEDED, *, days=0.0, target=None, whole=True):
        packed = bundle.scan(source, LIMIT)
        folder = paths.run_folder(name)
        row = registry.Run(
            *(name, "job", "local", target or os.uname().nodename, str(folder), "a", packed.hash),
            *(None, registry.now() - days * DAY, str(folder / "output")),
        )
        registry.add(row)
        if whole:
            bundle.unpack(bundle.store(packed), paths.private_folder(folder) / "source")
            for part in backend.FOLDERS:
                paths.private_folder(folder / part)
            paths.write(folder / "submitting", "")
        if whole and state in {State.QUEUED, State.RUNNING, State.STOPPING}:
            held.append((folder / "alive").open("w"))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
        if target is not None:
            (folder / "exit_records").rmdir()
        if state is not State.SUBMITTING:
            registry.confirm(name, name)
            registry.update(name, Status(state))
        return folder

    yield one
    for file in held:
        file.close()
