"""Runs on this machine that live as long as a test wants, and verbs on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from deploykit.run import registry
from deploykit.run.registry import Run

ROOT = Path(__file__).parent.parent
STAMP = "2026-11-21T01:46:08.123Z"
PATIENCE = 120
"""Seconds for what a verb shows."""


class LiveRun:
    """A run on this machine that is alive until `end`, as `local` sees it."""

    def __init__(self, folder, name):
        self.folder = folder / name
        (self.folder / "logs").mkdir(parents=True)
        (self.folder / "claim").write_text("1")
        self._alive = (self.folder / "alive").open("w")
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        host = os.uname().nodename
        registry.add(
            Run(name, name, "local", host, str(self.folder), "", "", None, registry.now(), "")
        )
        registry.confirm(name, name)

    def log(self, *lines):
        with (self.folder / "logs/node-0.log").open("a") as file:
            file.writelines(f"{STAMP} [rank 0] {line}\n" for line in lines)

    def end(self, code=0):
        (self.folder / "exit_records").mkdir()
        record = {"exit_code": code, "reason": "it ended", "rank": None, "attempt": 0}
        record["finished"] = "2099-01-01T00:00:00Z"
        (self.folder / "exit_records/node-0.json").write_text(json.dumps(record))
        self.close()

    def close(self):
        self._alive.close()


@pytest.fixture
def start(tmp_path):
    """Starts a run of a name."""
    started = []

    def begin(name):
        started.append(LiveRun(tmp_path, name))
        return started[-1]

    yield begin
    for one in started:
        one.close()


@pytest.fixture
def live(start):
    return start("live-run")


class OnTerminal:
    """A verb with a terminal of 80 columns; `until` reads what reaches it."""

    def __init__(self, *argv, program=("-m", "deploykit"), **env):
        self._ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._child = subprocess.Popen(
            [sys.executable, *program, *argv],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": "1", **env},
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
        )
        os.close(its)
        self.seen = ""

    def type(self, text):
        os.write(self._ours, text.encode())

    def until(self, text):
        end = time.monotonic() + PATIENCE
        while text not in self.seen:
            ready, _, _ = select.select([self._ours], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {text!r} within {PATIENCE} s in: {self.seen}"
            self.seen += os.read(self._ours, 1 << 16).decode()

    def end(self):
        try:
            while piece := os.read(self._ours, 1 << 16):
                self.seen += piece.decode()
        except OSError:  # the child has closed the terminal
            pass
        os.close(self._ours)
        return self._child.wait()
