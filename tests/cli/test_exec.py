"""`exec` and `shell`: a command beside a rank of a run on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.backends import base as backend
from deploykit.backends import local, sagemaker
from deploykit.cli import main as cli
from deploykit.job.model import Handle, State, Status
from deploykit.lib.errors import TryAgain, UsageError
from deploykit.observe import exit_records
from deploykit.run import registry
from tests.backends.slurm.slurm_helpers import wait_for
from tests.live_run import OnTerminal

ROOT = Path(__file__).parents[2]
WAITING = """\
import os, time
os.makedirs("inner", exist_ok=True)
os.chdir("inner")
open(f"up-{os.environ['RANK']}", "w").close()
while not os.path.exists("enough"):
    time.sleep(0.05)
"""


def deploykit(*words, text=None):
    """A verb in a process of its own, which the command replaces."""
    argv = [sys.executable, "-m", "deploykit", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        argv, env=env, input=text, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.torch
def test_a_command_and_a_shell_beside_a_rank(project, monkeypatch):
    (project / "train.py").write_text(WAITING)
    settings = ["resources.processes_per_node=2", "env.SHELL=/bin/sh", "env.PYTHONPATH=/mine"]
    words = [word for setting in settings for word in ("--set", setting)]
    row = json.loads(deploykit("submit", "--json", "--run", "one", *words).stdout)
    inner = Path(row["folder"], "source/inner")
    wait_for(lambda: all((inner / f"up-{rank}").exists() for rank in (0, 1)))
    script = 'cat; echo "$RANK/$WORLD_SIZE $PYTHONPATH $(pwd)" "$1" $DEPLOYKIT_STACK_FILE; exit 7'
    done = deploykit("exec", "--rank", "1", "--", "sh", "-c", script, "sh", "a  b", text="in\n")
    assert (done.returncode, done.stdout) == (7, f"in\n1/2 /mine {inner} a  b\n"), done.stderr
    done = deploykit("exec", "one", "--json", "--", "sh", "-c", "echo $RANK; echo no >&2; exit 3")
    assert done.returncode == 3
    found = {
        "schema_version": 1,
        "run": "one",
        "rank": 0,
        "exit_code": 3,
        "stdout": "0\n",
        "stderr": "no\n",
    }
    assert json.loads(done.stdout) == found
    done = deploykit("exec", "one", "--rank", "2", "--", "true")
    assert done.returncode == 75
    assert done.stderr == "error: rank 2 of one is not running\n  still running: ranks 0-1\n"
    monkeypatch.setenv("PS1", "> ")
    page = OnTerminal("shell", "one", "--rank", "1")
    page.type('echo "it is $((RANK + 41)) here"; exit 5\n')
    page.until("it is 42 here")
    assert page.end() == 5
    assert "one, rank 1: type `exit` to leave this shell" in page.seen
    (inner / "enough").touch()
    assert deploykit("wait", "one").returncode == 0
    done = deploykit("exec", "one", "--", "true")
    assert done.returncode == 66
    assert "error: no rank of one is running (state: succeeded)" in done.stderr


def record(folder, *ranks):
    (folder / "exit_records").mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        content = {"host": "n1", "python": "/py thon", "libraries": "/lib", "attempt": 0}
        (folder / f"exit_records/process-{rank}.json").write_text(json.dumps(content))


def test_the_command_line_of_this_machine(tmp_path):
    record(tmp_path, 0, 1)
    handle = Handle("local", os.uname().nodename, "one", "one", str(tmp_path))
    assert local.enter(handle, 1, ["ls", "a b"], terminal=False) == [
        *("env", "DEPLOYKIT_BACKEND=local", "LD_LIBRARY_PATH=/lib", "/py thon"),
        *(f"{tmp_path}/source/{backend.LAUNCH}", "--enter", str(tmp_path), "1", "--", "ls", "a b"),
    ]
    with pytest.raises(TryAgain, match="rank 7 of one is not running") as caught:
        local.enter(handle, 7, (), terminal=True)
    assert caught.value.hint == "still running: ranks 0-1"
    assert [one.rank for one in exit_records.processes(tmp_path)] == [0, 1]


def test_a_container_of_sagemaker_takes_only_a_person(tmp_path):
    handle = Handle("sagemaker", "eu-west-1", "exp-1", "exp-1", str(tmp_path))
    with pytest.raises(UsageError, match="does not allow access to its containers") as caught:
        sagemaker.enter(handle, 0, (), terminal=True)
    assert caught.value.hint.endswith("--set sagemaker.remote_debug=true")
    request = {"RemoteDebugConfig": {"EnableRemoteDebug": True}}
    (tmp_path / "plan.json").write_text(json.dumps(request))
    job = {"resources": {"processes_per_node": None, "gpus_per_node": 4}}
    (tmp_path / backend.JOB).write_text(json.dumps(job))
    session = "aws ssm start-session --region eu-west-1 --target sagemaker-training-job:exp-1_algo-"
    assert sagemaker.enter(handle, 3, (), terminal=True) == f"{session}1".split()
    assert sagemaker.enter(handle, 4, (), terminal=True) == f"{session}2".split()
    with pytest.raises(UsageError, match="not a command") as caught:
        sagemaker.enter(handle, 4, ["ls"], terminal=True)
    assert caught.value.hint == f"{session}2"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["exec", "live-run"], 64, "a command is required\n  put it after `--`"),
        (["exec", "live-run", "--", "true"], 75, "no rank of live-run is running"),
        (["exec", "live-run", "--rank", "-1", "--", "true"], 64, "--rank"),
        (["exec", "live-run", "--rank", "²", "--", "true"], 64, "is not a rank number such as 0"),
        (["shell", "live-run"], 64, "a shell requires a terminal for input and output"),
    ],
)
def test_what_cannot_be_entered_says_why(live, capsys, words, code, told):
    assert cli.main(words) == code
    assert told in capsys.readouterr().err


def test_the_command_of_a_shell_as_json(live, capsys):
    record(live.folder, 0)
    assert cli.main(["shell", "live-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["rank"], found["command"][-4:-2]) == (
        *("live-run", 0),
        ["--enter", str(live.folder)],
    )


def test_a_run_that_never_started(live, capsys):
    live.close()
    registry.update("live-run", Status(State.QUEUED, "", ""))
    assert cli.main(["exec", "live-run", "--", "true"]) == 66
    assert "no rank of live-run is running" in capsys.readouterr().err
