"""The command line in this process, and what is in the state folder."""

from __future__ import annotations

import os
import time

from deploykit.cli import main as cli
from deploykit.job.model import State
from deploykit.run import registry

DAY = 86400
AT_REST = [State.SUCCEEDED, State.FAILED, State.CANCELLED]
ACTIVE = [State.SUBMITTING, State.QUEUED, State.RUNNING, State.STOPPING, State.UNKNOWN]


def run(capsys, *words):
    code = cli.main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def names():
    return {row.run for row in registry.every()}


def tree(folder):
    """Every file and link below `folder`, with its content."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def age(path, seconds=7200):
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)
