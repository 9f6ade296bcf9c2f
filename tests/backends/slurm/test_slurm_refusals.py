"""Jobs that a real cluster refuses, never starts, or starts without reaching the trainer."""

from __future__ import annotations

import json

import pytest

from deploykit.cli import main as cli
from tests.backends.slurm.slurm_helpers import output, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]


@pytest.fixture
def deploykit(project, cluster, capsys):
    """Run a verb: its exit code, JSON and messages."""

    def run(*words):
        capsys.readouterr()
        code = cli.main([*words, "--json"])
        told = capsys.readouterr()
        return code, json.loads(told.out), told.err

    run.status = lambda name: run("status", name)[1][0]
    return run


def submit(run, *settings):
    sets = ("entrypoint.launcher=python", *settings)
    chosen = [word for setting in sets for word in ("--set", setting)]
    return ["submit", "--backend", "slurm", "--run", run, *chosen]


def test_a_job_for_more_nodes_than_there_are_is_warned_of_and_not_waited_for(deploykit, caplog):
    code, row, _ = deploykit(*submit("nine", "resources.nodes=9"))
    assert (code, row["state"]) == (0, "blocked")
    assert row["reason"].endswith("so it can never start")
    (warning,) = [r.getMessage() for r in caplog.records if "nine is queued, but" in r.getMessage()]
    assert "so it can never start; run `deploykit cancel nine` to remove the job" in warning
    code, row, told = deploykit("wait", "nine")
    assert (code, row["state"], row["native"]) == (81, "blocked", "PENDING")
    assert row["reason"].endswith("so it can never start")
    assert "nine is still queued; `deploykit cancel nine` removes it" in told
    code, row, _ = deploykit("cancel", "nine")
    assert (code, row["state"]) == (0, "cancelled")


def test_a_job_that_merely_waits_is_waited_for(deploykit):
    output("sbatch", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 900")
    deploykit(*submit("next"))
    wait_for(lambda: deploykit.status("next")["reason"])
    assert deploykit("wait", "next", "--timeout", "0.1")[0] == 124
    output("scontrol", "hold", "jobname=next")
    wait_for(lambda: "held by " in deploykit.status("next")["reason"])
    code, row, _ = deploykit("wait", "next", "--timeout", "0.1")
    assert (code, row["state"]) == (124, "queued")


def test_a_refused_job_has_one_story(deploykit):
    """The controller lists the job as failed, although sbatch refused it."""
    code, told, _ = deploykit(*submit("gpu", "resources.gpus_per_node=8"))
    assert code == 76
    assert "Slurm refused the job" in told["error"]["message"]
    assert "BadConstraints" in output("squeue", "--states=all", "--name=gpu", "--format=%r")
    row = deploykit.status("gpu")
    assert (row["state"], row["handle"], row["exit_code"]) == ("unsent", None, None)
    assert row["reason"] == told["error"]["message"]


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("modules=[cuda/99]", "module load cuda/99 failed (slurm.modules)"),
        ("setup=[. nowhere/activate]", "slurm.setup failed with exit code 1: . nowhere/activate"),
        (
            "setup=['true', test -d /nope]",
            "slurm.setup failed with exit code 1: test -d /nope",
        ),
        ("setup=[x=$(exit 7), echo never]", "slurm.setup failed with exit code 7: x=$(exit 7)"),
    ],
)
def test_what_keeps_a_job_from_starting_is_the_reason_and_the_cause(deploykit, setting, why):
    deploykit(*submit("one", f"slurm.{setting}"))
    code, row, _ = deploykit("wait", "one")
    assert (code, row["reason"]) == (78, f"the job cannot start: {why}")
    _, found, _ = deploykit("diagnose", "one")
    assert [cause["cause"] for cause in found["causes"]] == ["environment_setup"]


ONE_FAILS = """\
import os
if os.environ["SLURM_ARRAY_TASK_ID"] == "1":
    raise ValueError("label 7 is not below 5")
"""


def test_an_array_is_diagnosed_from_the_log_of_the_task_that_failed(deploykit, project, capsys):
    (project / "train.py").write_text(ONE_FAILS)
    deploykit(*submit("arr", "slurm.array=3"))
    assert deploykit("wait", "arr")[0] == 1
    _, found, _ = deploykit("diagnose", "arr")
    (cause,) = found["causes"]
    assert (cause["cause"], cause["first_rank"]) == ("user_code_error", 0)
    assert "/tasks/1/logs/node-0.log" in cause["evidence"][0]["file"]
    assert cli.main(["logs", "arr", "--first-error"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == "[task 1] [rank 0] ValueError: label 7 is not below 5"
    assert "cause: user_code_error, " in told.err


TWO_FAIL = """\
import os
task = os.environ["SLURM_ARRAY_TASK_ID"]
print("task", task, flush=True)
if task in "13" and not os.path.exists(os.environ["WORKS"]):
    raise ValueError("no")
"""


def test_only_the_failed_tasks_of_an_array_run_again(deploykit, project, capsys, tmp_path):
    (project / "train.py").write_text(TWO_FAIL)
    deploykit(*submit("arr", "slurm.array=4", f"env.WORKS={tmp_path}/works"))
    assert deploykit("wait", "arr")[0] == 1
    (tmp_path / "works").touch()
    code, _, _ = deploykit("rerun", "arr", "--failed", "--run", "again")
    assert code == 0
    assert deploykit("wait", "again")[0] == 0
    _, (found,), _ = deploykit("status", "again")
    tasks = [(one["task"], one["state"]) for one in found["tasks"]]
    assert tasks == [(1, "succeeded"), (3, "succeeded")]
    assert found["reason"] == "2 tasks: 2 succeeded"
    assert cli.main(["logs", "again", "--task", "3"]) == 0
    assert capsys.readouterr().out == "[task 3] [rank 0] task 3\n"
    assert cli.main(["logs", "again", "--task", "2"]) == 64
    assert "existing tasks: 1, 3" in capsys.readouterr().err
    assert cli.main(["rerun", "again", "--failed"]) == 64
    assert "again: no task has failed" in capsys.readouterr().err
