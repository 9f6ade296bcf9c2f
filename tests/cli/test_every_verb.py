"""Every verb on all three backends, as a user types it: what `make test` checks first.

One program that checks its own result trains nothing and needs two ranks: on this machine, on two
nodes of a real Slurm cluster, and as a training job of a moto server, which runs nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from tests import documents
from tests.aws_server import SECTION
from tests.observe.trackers.tracked import history

ROOT = Path(__file__).parents[2]
RANKS = 2
PROGRAM = """\
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", total.item(), "arguments", sys.argv[1:], flush=True)
print("step 2/2 loss 0.5", flush=True)
dist.destroy_process_group()
"""
JOB = """\
name: sum
entrypoint: {script: train.py, args: [--lr, 0.10, a b]}
resources: {nodes: 1, processes_per_node: 2, time_limit: 5m}
env: {OMP_NUM_THREADS: 1}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A job file and its program."""
    here = tmp_path / "a project"
    here.mkdir()
    (here / "train.py").write_text(PROGRAM)
    (here / "job.yaml").write_text(JOB)
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def deploykit(folder, capsys):
    """Run a verb; what it prints, which is JSON with `--json`.

    The first call of each verb starts a process; later calls run in this one, which is faster.
    """
    seen = set()

    def printed(words):
        if words[0] in seen:
            capsys.readouterr()
            return cli.main(list(words)), *capsys.readouterr()
        seen.add(words[0])
        done = subprocess.run(
            [sys.executable, "-m", "deploykit", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def run(*words, code=0):
        ended, out, err = printed(words)
        assert ended == code, out + err
        if "--json" not in words:
            return out
        data = json.loads(out)
        assert documents.problems(words[0], data) == []
        return data

    return run


def options(backend, *settings):
    return ["--backend", backend, *(word for setting in settings for word in ("--set", setting))]


def plan_and_submit(deploykit, backend, run, *settings):
    """Check, dry run, submit twice: the plan was shown before, and there is one run."""
    chosen = options(backend, *settings)
    deploykit("check", *chosen)
    shown = deploykit("submit", *chosen, "--run", run, "--dry-run")
    row = deploykit("submit", *chosen, "--run", run, "--json")
    assert deploykit("submit", *chosen, "--run", run, "--json")["handle"] == row["handle"]
    kept = next(Path(row["folder"]).glob("plan.*"))
    assert kept.read_text() == shown
    return row


def succeeds(deploykit, backend, *settings):
    """A run from the check to its logs."""
    board = Path.cwd().parent / "board"
    row = plan_and_submit(deploykit, backend, "good", *settings, f"track.tensorboard={board}")
    assert row["handle"].startswith(f"{backend}://")
    assert deploykit("wait", "good", "--json")["state"] == "succeeded"
    lines = [line for line in deploykit("logs", "good").splitlines() if "] sum" in line]
    assert (
        sorted(line.split("] ", 1)[1] for line in lines)
        == ["sum 3.0 arguments ['--lr', '0.10', 'a b']"] * RANKS
    )
    (listed,) = deploykit("list", "--json", "--state", "succeeded")
    assert listed["run"] == "good"
    (seen,) = deploykit("watch", "good", "--once", "--json")
    assert (seen["state"], seen["error"], seen["attempt"]) == ("succeeded", [], 0)
    shown = deploykit("metrics", "good", "--json")
    assert (shown["progress"]["step"], shown["progress"]["loss"]) == (2, 0.5)
    assert deploykit("metrics", "good", "--csv").endswith(",loss,0.5,log (text)\n")
    assert is_tracked(deploykit, board) == [2]
    assert listed["created"] <= listed["started"] <= listed["finished"]
    assert listed["duration_seconds"] > 0
    kept = next(Path(row["folder"]).glob("plan.*")).read_text()
    assert deploykit("rerun", "good", "--run", "good", "--dry-run") == kept
    assert f"Run good on {backend}: succeeded" in deploykit("guide", "rendezvous", "good")


def is_tracked(deploykit, board):
    """The steps of the loss at a tracker, sent in the background of `submit` or by `sync`."""
    assert deploykit("sync", "good", "--json")["trackers"][0]["error"] is None
    assert deploykit("sync", "good", "--json")["trackers"][0]["values"] == 0
    return [step for step, _ in history(board / "good", "loss")]


def fails(deploykit, backend, *settings):
    """A run that ends with a code of the program's own, which every verb knows."""
    Path("fail.py").write_text("raise SystemExit(3)\n")
    script = "entrypoint={script: fail.py}"
    deploykit("submit", *options(backend, *settings, script), "--run", "bad")
    assert deploykit("wait", "bad", "--json", code=3)["exit_code"] == 3
    (row,) = deploykit("status", "bad", "--json")
    assert (row["state"], row["exit_code"]) == ("failed", 3)
    assert deploykit("diagnose", "bad", "--json", code=82)["ending"] == "unknown"


def is_cancelled(deploykit, backend, *settings):
    """A run that is stopped."""
    sleep = "entrypoint={script: sleep.py}"
    Path("sleep.py").write_text("import time; time.sleep(600)\n")
    row = deploykit("submit", *options(backend, *settings, sleep), "--run", "long", "--json")
    shows_where_it_stands(deploykit, Path(row["folder"]))
    deploykit("cancel", "long")
    assert deploykit("wait", "long", "--json", code=143)["state"] == "cancelled"


def shows_where_it_stands(deploykit, folder):
    """The stacks of both ranks, once both have reached the line that sleeps."""
    while len(list(folder.glob("exit_records/process-*.json"))) < RANKS:
        time.sleep(0.1)
    while not (found := deploykit("dump", "long", "--json"))["summary"].endswith("(sleep.py:1)"):
        time.sleep(0.1)
    assert found["groups"][0]["ranks"] == list(range(RANKS))


def are_removed(deploykit):
    """What the runs above took is shown and removed; the places with files elsewhere."""
    shown = {one["run"]: one["bytes"] for one in deploykit("disk", "--json")["runs"]}
    folders = [Path(one["folder"]) for one in deploykit("list", "--json")]
    (removed,) = deploykit("rm", "good", "--json")
    assert removed["bytes"] == shown["good"] > 0
    rest = deploykit("prune", "--keep-last", "0", "--yes", "--json")["removed"]
    assert {one["name"] for one in rest if one["kind"] == "run"} == shown.keys() - {"good"}
    assert not any(folder.exists() for folder in folders)
    assert deploykit("list", "--json") == []
    return [one["location"] for one in removed["left"]]


@pytest.mark.torch
@pytest.mark.quick
def test_on_this_machine(deploykit):
    succeeds(deploykit, "local")
    fails(deploykit, "local")
    is_cancelled(deploykit, "local")
    deploykit("doctor", "--backend", "local", "--json")
    assert are_removed(deploykit) == []


@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.quick
@pytest.mark.xdist_group("slurm")
def test_on_a_slurm_cluster(cluster, deploykit):
    two = ("resources.nodes=2", "resources.processes_per_node=1")
    succeeds(deploykit, "slurm", *two)
    page = deploykit("guide", "nccl", "good")
    nodes = re.findall(r"^\| (\d) \| \S+ \| [\d.]+ \|", page, re.MULTILINE)
    assert nodes == ["0", "1"]
    page = deploykit("guide", "rendezvous", "good")
    assert re.search(r"^Node 0 listened at \S+ port \d+\.$", page, re.MULTILINE)
    fails(deploykit, "slurm", *two)
    is_cancelled(deploykit, "slurm", *two)
    deploykit("doctor", "--backend", "slurm", "--json")
    assert deploykit("backends", "slurm", "--probe")
    assert are_removed(deploykit) == []


@pytest.mark.aws
@pytest.mark.quick
def test_on_sagemaker(aws, folder, deploykit, monkeypatch, tmp_path):
    """moto runs nothing, ends each job at once and cannot stop one."""
    with (folder / "job.yaml").open("a") as file:
        file.write(SECTION)
    board = tmp_path / "board"
    row = plan_and_submit(deploykit, "sagemaker", "good", f"track.tensorboard={board}")
    assert row["handle"] == "sagemaker://us-east-1/good"
    assert deploykit("wait", "good", "--json")["state"] == "succeeded"
    shown = deploykit("rerun", "good", "--run", "good", "--dry-run")
    assert shown == Path(row["folder"], "plan.json").read_text()
    deploykit("logs", "good")
    assert is_tracked(deploykit, board) == []  # moto has no metrics
    assert "Run good on sagemaker: succeeded" in deploykit("guide", "security-groups", "good")
    assert are_removed(deploykit) == ["s3://my-bucket/deploykit/runs/good/"]

    state = ["InProgress", "Training"]
    aws.answers |= {
        "StopTrainingJob": lambda _: state.__setitem__(slice(None), ["Stopped", "Stopped"]) or {},
        "DescribeTrainingJob": lambda body: {
            **body,
            "TrainingJobArn": "arn:aws:sagemaker:us-east-1:123456789012:training-job/good",
            "TrainingJobStatus": state[0],
            "SecondaryStatus": state[1],
            "FinalMetricDataList": [{"MetricName": "loss", "Value": 0.25, "Timestamp": 1.0}],
        },
    }
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / "another machine"))
    attached = deploykit(
        "attach", "good", "--backend", "sagemaker", "--target", "us-east-1", "--json"
    )
    assert attached["state"] == "running"
    (point,) = deploykit("metrics", "good", "--json")["points"]
    assert (point["name"], point["value"]) == ("loss", 0.25)
    assert deploykit("watch", "good", "--json")[0]["state"] == "running"
    assert deploykit("cancel", "good", "--json")["state"] == "cancelled"
    (row,) = deploykit("status", "good", "--json")
    assert row["state"] == "cancelled"


@pytest.mark.quick
def test_without_a_backend(deploykit):
    assert "submit" in deploykit("--help")
    deploykit("init", "new.yaml")
    deploykit("check", "new.yaml", "--backend", "local")
    assert deploykit("config").splitlines()[0] == "backend\tlocal\tdefault"
    names = [line.split()[0] for line in deploykit("backends").splitlines()]
    assert {"local", "slurm", "sagemaker"} <= set(names)
    assert "complete" in deploykit("completion", "bash")
    assert deploykit("infra", "--help")
    assert deploykit("advise", "--help")
