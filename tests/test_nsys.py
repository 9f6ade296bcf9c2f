"""``--profile nsys``: every rank below Nsight Systems, for which a small program stands in."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from deploykit.backends import sagemaker
from deploykit.cli import main as cli
from deploykit.job.model import Entrypoint, JobSpec, Resources
from deploykit.run import registry
from tests import nsys_stand_in
from tests.backends.sagemaker.sagemaker_jobs import OPTIONS

STOPPING = """\
import os, signal, sys, time
from pathlib import Path

def stop(*_):
    print("the program stops", flush=True)
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
Path("ready").touch()
time.sleep(200)
"""

RANGE = """\
import os, time
from pathlib import Path
import torch

CALLS = Path(os.environ["NSYS_STAND_IN_RANGE"])
torch.cuda.is_available = lambda: True
torch.cuda.synchronize = lambda: None
torch.cuda.profiler.start = lambda: (CALLS / f"begin-{os.getpid()}").write_text(str(step))
torch.cuda.profiler.stop = lambda: (CALLS / f"end-{os.getpid()}").write_text(str(step))
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 9):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    while step == 6 and not list(Path(os.environ["DEPLOYKIT_RUN_DIR"]).glob("profile/*.nsys-rep")):
        time.sleep(0.05)
print("the program goes on", flush=True)
"""


@pytest.fixture
def nsys(tmp_path, monkeypatch):
    """``nsys`` on the PATH."""
    folder = nsys_stand_in.install(tmp_path / "nsys bin")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def submit(*words):
    return cli.main(["submit", "--backend", "local", "--run", "prof", *words])


def report(rank=0):
    folder = Path(registry.get("prof").folder)
    return json.loads((folder / f"profile/rank-{rank}.nsys-rep").read_text())


@pytest.mark.slow
def test_a_rank_keeps_its_output_and_its_exit_code_below_nsys(nsys, project, capsys):
    Path("train.py").write_text("import sys; print('hello'); sys.exit(7)")
    assert submit("--profile", "nsys", "--wait") == 7
    shown = "".join(capsys.readouterr())
    assert "[rank 0] hello" in shown
    assert "rank 0 exited with code 7" in shown
    assert report()["program_ended"] is not None
    assert cli.main(["profile", "prof"]) == 0
    file = Path(registry.get("prof").folder) / "profile/rank-0.nsys-rep"
    assert capsys.readouterr().out.splitlines() == [
        "prof: 1 Nsight Systems report",
        f"nsys-ui {shlex.quote(str(file))}",
        f"summary in the terminal: nsys stats {shlex.quote(str(file))}",
    ]
    assert cli.main(["profile", "prof", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["ranks"], [one["file"] for one in data["files"]]) == ([], [str(file)])


@pytest.mark.slow
def test_a_stop_signal_goes_to_the_program_and_the_report_is_written(nsys, project, capsys):
    Path("train.py").write_text(STOPPING)
    assert submit("--profile", "nsys") == 0
    folder = Path(registry.get("prof").folder)
    wait_for(folder / "source/ready")
    assert cli.main(["cancel", "prof"]) == 0
    assert cli.main(["wait", "prof"]) == 143
    capsys.readouterr()
    assert cli.main(["logs", "prof"]) == 0
    log = capsys.readouterr().out
    assert "the program stops" in log
    assert "the report is dropped" not in log
    assert report()["program_ended"] is not None


@pytest.mark.slow
def test_a_program_does_not_outlive_the_processes_above(nsys, project):
    Path("train.py").write_text(STOPPING)
    assert submit("--profile", "nsys") == 0
    folder = Path(registry.get("prof").folder)
    wait_for(folder / "source/ready")
    (record,) = folder.glob("exit_records/process-*.json")
    below = json.loads(record.read_text())["pid"]
    rank = parent(below)
    above = parent(parent(rank))  # nsys is between them
    os.kill(above, signal.SIGKILL)
    end = time.monotonic() + 60
    while Path(f"/proc/{below}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert cli.main(["wait", "prof"]) == 137


@pytest.mark.torch
@pytest.mark.slow
def test_the_wanted_steps_alone_are_recorded(nsys, project, tmp_path, capsys):
    """What shows the steps to nsys stands in for CUDA's calls as well."""
    calls = tmp_path / "calls"
    calls.mkdir()
    Path("train.py").write_text(RANGE)
    words = ["--set", f"env.NSYS_STAND_IN_RANGE={calls}", "--wait"]
    assert submit("--profile", "nsys:3:5", *words) == 0
    shown = "".join(capsys.readouterr())
    assert "warning: argument --profile: nsys can profile selected steps only with CUDA" in shown
    assert "[rank 0] deploykit: profiled steps 3 to 5: " in shown
    assert "the program goes on" in shown
    told = {file.name.partition("-")[0]: file.read_text() for file in calls.iterdir()}
    assert told == {"begin": "2", "end": "5"}
    assert report()["program_ended"] is None
    assert report()["options"]["--capture-range-end"] == "stop"


@pytest.mark.torch
@pytest.mark.slow
def test_two_ranks_have_two_reports_and_no_gpu_none_of_steps(nsys, project, capsys):
    two = ["--set", "resources.processes_per_node=2", "--wait"]
    assert submit("--profile", "nsys", *two) == 0
    assert report(0)["options"]["--output"] != report(1)["options"]["--output"]
    Path("train.py").write_text(RANGE.replace("lambda: True", "lambda: False").replace("6", "9"))
    words = ["submit", "--backend", "local", "--wait", "--set", "env.NSYS_STAND_IN_RANGE=/nowhere"]
    assert cli.main([*words, "--profile", "nsys:3:5"]) == 0
    shown = "".join(capsys.readouterr())
    assert (
        "deploykit: no profile: RuntimeError('nsys can record individual steps only on a" in shown
    )
    assert "[rank 0] deploykit: no profile: nsys exited with code 0 without a report" in shown


def test_a_machine_without_nsys_is_known_before_the_job(project, capsys):
    assert submit("--profile", "nsys") == 65
    assert "profile: nsys is not on PATH" in capsys.readouterr().err
    assert cli.main(["check", "--backend", "local", "--set", "profile=nsys"]) == 65


def test_ranks_of_sagemakers_toolkit_are_refused_before_the_job():
    job = JobSpec(
        name="j",
        entrypoint=Entrypoint("train.py"),
        resources=Resources(time_limit=60, gpus_per_node=1),
        profile="nsys",
    )
    problems = {one.path: one.message for one in sagemaker.check(job, OPTIONS)}
    assert problems["profile"].startswith("nsys needs ranks started by deploykit")


def wait_for(file):
    end = time.monotonic() + 100
    while not file.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
