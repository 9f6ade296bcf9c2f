"""Verbs that wait: for a reader that has gone, a lock, and a clock that was set back."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploykit.cli import describe
from deploykit.cli import main as cli
from deploykit.lib import units
from deploykit.run import registry
from tests.backends.slurm.slurm_helpers import wait_for
from tests.live_run import PATIENCE, ROOT

QUIET = {"wait": ["wait", "live-run"], "logs": ["logs", "-f", "live-run"]}


@pytest.mark.parametrize("verb", QUIET)
def test_a_closed_pipe_ends_a_verb_that_has_nothing_to_say(verb, live):
    """The run prints nothing more, and does not end."""
    live.log("step 1")
    source, sink = os.pipe()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "deploykit", *QUIET[verb]]
    with subprocess.Popen(argv, stdout=sink, stderr=subprocess.PIPE, text=True, env=env) as child:
        os.close(sink)
        tasks = Path(f"/proc/{child.pid}/task")
        wait_for(lambda: len(list(tasks.iterdir())) > 1 or child.poll() is not None, PATIENCE)
        os.close(source)
        assert (child.wait(PATIENCE), child.stderr.read()) in {(141, ""), (141, WAITS)}


WAITS = "live-run: running\n"


def test_a_locked_registry_is_named(live):
    lock = sqlite3.connect(registry._file(), isolation_level=None)
    with contextlib.closing(lock):
        lock.execute("BEGIN EXCLUSIVE")
        argv = [sys.executable, "-m", "deploykit", "list"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=env) as child:
            said = child.stderr.readline()
            lock.execute("ROLLBACK")
            assert "live-run" in child.stdout.read()
            assert child.wait(PATIENCE) == 0
    assert said.startswith(f"waiting up to 60 s for the registry of runs {registry._file()}, ")


def test_a_clock_that_was_set_back_makes_no_negative_age(live, monkeypatch, capsys):
    assert units.span(-5.0) == "0s"
    before = time.time() - 7200
    monkeypatch.setattr(registry, "now", lambda: before)
    monkeypatch.setattr(describe, "now", lambda: before)
    for verb in (["status", "live-run"], ["list"]):
        assert cli.main(verb) == 0
        assert not {word for word in capsys.readouterr().out.split() if word.startswith("-")} - {
            "-"
        }
