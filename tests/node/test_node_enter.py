"""A command beside a rank that runs: its environment, its folder, how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit_node.observe import hooks

LAUNCH = Path(__file__).parents[2] / "entrypoints/launch.py"


@pytest.fixture
def beside(tmp_path):
    """A rank 3 that runs on this machine, and a function that runs a command beside it."""
    records = tmp_path / "exit_records"
    records.mkdir()
    env, file = hooks.environment({"PATH": os.environ["PATH"], "RANK": "3"}, tmp_path, 3)
    code = "import time; print(1, flush=True); time.sleep(600)"
    (tmp_path / "a folder").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, cwd=tmp_path / "a folder", stdout=subprocess.PIPE
    )
    process.stdout.readline()
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    record = {"pid": process.pid, "started": int(stat[19]), "world_size": 4, "attempt": 0}
    record |= {"host": os.uname().nodename, "python": "", "libraries": "", "stacks": str(file)}
    (records / "process-3.json").write_text(json.dumps(record))

    def enter(*command, rank="3", python=sys.executable, **env):
        argv = [python, LAUNCH, "--enter", tmp_path, rank, "--", *command]
        return subprocess.run(
            argv, env={"X": "mine", **env}, capture_output=True, text=True, check=False
        )

    enter.process, enter.folder = process, tmp_path
    yield enter
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("python", ["3.10", "this"])
def test_the_environment_is_that_of_the_rank(beside, python, request):
    chosen = sys.executable if python == "this" else request.getfixturevalue("old_python")
    done = beside("env", "--null", python=chosen, TERM="xterm")
    seen = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    assert seen == {"PATH": os.environ["PATH"], "RANK": "3", "TERM": "xterm"}
    assert beside("pwd").stdout == f"{beside.folder / 'a folder'}\n"


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        (["nonesuch"], 127, "deploykit: nonesuch: not found on this node\n"),
        (["/etc"], 126, "deploykit: /etc: Permission denied\n"),
        (["sh", "-c", "exit 3"], 3, ""),
    ],
)
def test_it_ends_as_the_command_ends(beside, command, code, told):
    done = beside(*command)
    assert (done.returncode, done.stderr) == (code, told)


def test_a_rank_that_has_ended_is_not_entered(beside):
    assert beside("true", rank="2").returncode == 69
    beside.process.kill()
    beside.process.wait()
    done = beside("true")
    assert done.returncode == 69
    assert "rank 3 is no longer running on" in done.stderr
