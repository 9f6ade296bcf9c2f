"""A real MLflow server: one run, whatever the restarts; every step once, whatever was repeated."""

from __future__ import annotations

import json
import math

import pytest

from deploykit.backends import slurm
from deploykit.cli import main as cli
from deploykit.run import registry
from tests.backends.slurm.slurm_helpers import ended, output, wait_for
from tests.observe.trackers.mlflow_server import mlflow  # noqa: F401 - a fixture
from tests.observe.trackers.tracked import attempt, loss, sent, sync, tracked
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]


def test_a_run_that_was_preempted_thrice(live, mlflow, capsys):  # noqa: F811
    """Each attempt begins at its checkpoint, ten steps before the end of the one before."""
    tracked(live, {"mlflow": mlflow.address})
    for number, first in enumerate((0, 20, 40, 60)):
        attempt(live, number, range(first, first + 30))
        sent(capsys)
        (run,) = mlflow.runs("live-run")
        assert run["info"]["status"] == "RUNNING"
    live.end()
    assert sent(capsys) == 2  # the newest step of loss and lr
    assert sent(capsys) == 0
    (live.folder / "tracking.json").unlink()
    assert sent(capsys) == 0
    (run,) = mlflow.runs("live-run")
    assert mlflow.history(run, "loss") == [(step, loss(step)) for step in range(90)]
    assert mlflow.history(run, "lr") == [(step, 0.1) for step in range(90)]
    assert (run["info"]["status"], run["info"]["run_name"]) == ("FINISHED", "live-run")
    assert run["info"]["end_time"] == 4070908800000
    params = {one["key"]: one["value"] for one in run["data"]["params"]}
    assert params == {"--lr": "0.1", "--_odd name": "x", "entrypoint.script": "train.py"}
    tags = {one["key"]: one["value"] for one in run["data"]["tags"]}
    assert (tags["deploykit.run"], tags["deploykit.backend"]) == ("live-run", "local")


PROGRAM = """\
import os, time
first = 10 * int(os.environ["DEPLOYKIT_RESTART_COUNT"])
for step in range(first, first + 15):
    print(f"step {step}/45 loss {1 / (1 + step)}", flush=True)
if first < 30:
    print("waits", flush=True)
    time.sleep(900)
"""
"""Begins each attempt at its checkpoint, five steps before the end of the one before."""


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.torch
def test_a_job_that_slurm_requeues_thrice(cluster, project, mlflow):  # noqa: F811
    """No one runs `sync`: the process that `submit` started follows the job to its end."""
    (project / "train.py").write_text(PROGRAM)
    argv = ["submit", "--backend", "slurm", "--run", "thrice"]
    assert cli.main([*argv, "--set", f"track.mlflow={mlflow.address}"]) == 0
    handle = registry.known("thrice").handle
    for restart in (1, 2, 3):
        wait_for(lambda n=restart: [one.text for one in lines(handle)].count("waits") == n)
        output("scontrol", "requeue", handle.id)
    assert ended(handle).state.value == "succeeded"
    wait_for(lambda: mlflow.runs("hello")[0]["info"]["status"] == "FINISHED")
    (run,) = mlflow.runs("hello")
    assert mlflow.history(run, "loss") == [(step, loss(step)) for step in range(45)]


def lines(handle):
    return list(slurm.logs(handle, follow=False))


def test_odd_names_and_values(start, mlflow, capsys):  # noqa: F811
    live = tracked(start("odd-run"), {"mlflow": mlflow.address})
    (live.folder / "output").mkdir()
    lines = [{"step": 1, "recall@5": 0.5, "é": math.nan}, {"step": 2, "é": math.inf, "n": 2**2000}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (live.folder / "output/metrics.jsonl").write_text(text)
    live.log("val_loss: 0.25", "val_loss: 0.125")  # without a step
    live.end(code=1)
    assert sent(capsys, "odd-run") == 6
    (run,) = mlflow.runs("odd-run")
    assert run["info"]["status"] == "FAILED"
    assert mlflow.history(run, "recall_5") == [(1, 0.5)]
    assert mlflow.history(run, "_") == [(1, "NaN"), (2, pytest.approx(1.797e308, 1e-3))]
    assert mlflow.history(run, "val_loss") == [(0, 0.25), (1, 0.125)]


def test_many_values_take_several_requests(start, mlflow, capsys):  # noqa: F811
    live = tracked(start("long-run"), {"mlflow": mlflow.address})
    attempt(live, 0, range(3000))
    live.end()
    assert sent(capsys, "long-run") == 6000
    (run,) = mlflow.runs("long-run")
    assert len(mlflow.history(run, "loss")) == 3000


def test_a_server_that_is_down_gets_everything_later(start, mlflow, capsys):  # noqa: F811
    live = start("later-run")
    down = f"http://127.0.0.1:{free_port()}"
    tracked(live, {"mlflow": down})
    attempt(live, 0, range(10))
    said = sync(capsys, "later-run", code=69).err
    assert said.startswith(f"error: {down} cannot be reached: ")
    assert "nothing is lost" in said
    live.end()
    tracked(live, {"mlflow": mlflow.address})  # it has another port now
    assert sent(capsys, "later-run") == 20


def test_a_run_that_was_deleted_there(start, mlflow, capsys):  # noqa: F811
    live = tracked(start("deleted-run"), {"mlflow": mlflow.address})
    attempt(live, 0, range(10))
    live.end()
    sent(capsys, "deleted-run")
    (run,) = mlflow.runs("deleted-run")
    mlflow.post("runs/delete", run_id=run["info"]["run_id"])
    said = sync(capsys, "deleted-run", code=66).err
    assert f"the run was deleted in MLflow: {mlflow.address}/#/experiments/" in said
    mlflow.post("runs/restore", run_id=run["info"]["run_id"])
    assert sent(capsys, "deleted-run") == 0
