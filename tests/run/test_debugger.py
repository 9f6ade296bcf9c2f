"""`submit --debugger` and `shell --debugger`: an editor stops a rank, and looks at it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit_node.cluster import BadEnvironment
from deploykit_node.observe import hooks
from tests.debug_client import Editor
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import os
rank = int(os.environ["RANK"])
total = 0
for step in range(3):
    total += step
print("total", total, flush=True)
"""
STOP = 5
"""The line at which the editor stops the program."""


def deploykit(start, *words):
    """A verb in a process of its own, by `subprocess.run` or `Popen`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "deploykit", *words]
    return start(argv, env=env, text=True, stdout=subprocess.PIPE)


@contextmanager
def served(run):
    """The editor's settings for a run, while connections are passed on."""
    port = free_port()
    with deploykit(subprocess.Popen, "shell", run, "--debugger", "--port", str(port)) as serving:
        try:
            text = ""
            while not text.endswith("\n}\n"):
                text += serving.stdout.readline()
            yield json.loads(text), serving
        except BaseException:
            serving.kill()
            raise
        assert serving.wait() == 0


def look(configuration):
    """Stop in each round of the loop, and continue; what the editor saw last."""
    editor = Editor(configuration["connect"]["port"])
    mappings = configuration["pathMappings"]
    file = str(Path(mappings[0]["localRoot"], "train.py"))
    editor.attach(mappings, {file: [STOP]})
    for _ in range(3):
        thread = editor.event("stopped")["threadId"]
        frame = editor.ask("stackTrace", threadId=thread)["stackFrames"][0]
        seen = editor.ask("evaluate", expression="rank, step, total", frameId=frame["id"])
        editor.ask("continue", threadId=thread)
    editor.event("terminated")
    editor.close()
    return frame["source"]["path"], frame["line"], seen["result"]


@pytest.mark.torch
def test_an_editor_stops_a_rank_at_a_line(project):
    check(project, "1", "--processes-per-node", "2")


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.xdist_group("slurm")
def test_an_editor_stops_a_rank_of_the_second_node(cluster, project):
    check(project, "3", "--processes-per-node", "2", "--nodes", "2", "--backend", "slurm")


def check(project, rank, *words):
    """A breakpoint in a rank; its editor does not reach the node itself."""
    (project / "train.py").write_text(SCRIPT)
    settings = ["--debugger", rank, "--run", "one", *words]
    assert deploykit(subprocess.run, "submit", *settings).returncode == 0
    with served("one") as (configuration, _):
        assert Path(configuration["pathMappings"][0]["remoteRoot"], "train.py").exists()
        found = look(configuration)
    assert found == (str(project / "train.py"), STOP, f"({rank}, 2, 1)")
    assert deploykit(subprocess.run, "wait", "one").returncode == 0
    printed = deploykit(subprocess.run, "logs", "one").stdout
    assert f"[rank {rank}] waiting for a debugger: `deploykit shell one --debugger`\n" in printed
    assert f"[rank {rank}] total 3\n" in printed


def test_a_run_of_which_no_rank_waits(live, capsys):
    assert cli.main(["shell", "--debugger"]) == 64
    assert "error: no rank of live-run is waiting for a debugger" in capsys.readouterr().err


SAGEMAKER = """
sagemaker:
  role: arn:aws:iam::123456789012:role/training
  bucket: my-bucket
  region: us-east-1
  instance_type: ml.g5.12xlarge
"""


@pytest.mark.parametrize(
    ("backend", "rank", "said"),
    [
        ("local", "2", "rank '2' does not exist"),
        ("sagemaker", "0", "editors cannot connect to SageMaker's containers"),
    ],
)
def test_a_debugger_that_could_not_connect_is_refused(project, capsys, backend, rank, said):
    with (project / "job.yaml").open("a") as file:
        file.write(SAGEMAKER)
    words = ["--backend", backend, "--processes-per-node", "2", "--dry-run"]
    assert cli.main(["submit", *words, "--debugger", rank]) == 65
    assert f"argument --debugger: {said}" in capsys.readouterr().err


def test_a_node_without_debugpy_says_so(monkeypatch):
    hooks.check_debugger({"DEPLOYKIT_DEBUGGER": "0"})
    monkeypatch.setitem(sys.modules, "debugpy", None)  # as where it is not installed
    hooks.check_debugger({})
    with pytest.raises(BadEnvironment, match="debugpy is not installed"):
        hooks.check_debugger({"DEPLOYKIT_DEBUGGER": "0"})
