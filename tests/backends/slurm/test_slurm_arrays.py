"""Job arrays: expanding ids, combining the status of tasks, and a real array."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import Options, arrays, states
from deploykit.job.model import Entrypoint, Handle, JobSpec, Resources, State, Status
from deploykit.lib import paths
from tests.backends.slurm.slurm_helpers import ended, folder_of, output, wait_for

real = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]


@pytest.mark.parametrize(
    ("job", "tasks"),
    [
        ("38", "38"),
        ("38_4", "38_4"),
        ("38_[5-7,9%2]", "38_5 38_6 38_7 38_9"),
        ("38_[3]", "38_3"),
    ],
)
def test_each_task_has_an_id_and_a_row_of_squeue(job, tasks):
    assert list(arrays.task_ids(job)) == tasks.split()
    line = f"{job}|PENDING|N/A|N/A|1|main|9|Priority|run-a|/a"
    assert [row.id for row in states.parse_squeue(line)] == tasks.split()


@pytest.mark.parametrize(
    ("tasks", "state", "reason"),
    [
        (
            "succeeded running queued failed",
            "running",
            "4 tasks: 1 running, 1 queued, 1 succeeded, 1 failed; task 1: running",
        ),
        ("succeeded failed", "failed", "2 tasks: 1 succeeded, 1 failed; task 1: failed"),
        ("succeeded succeeded", "succeeded", "2 tasks: 2 succeeded"),
        (
            "succeeded cancelled",
            "cancelled",
            "2 tasks: 1 succeeded, 1 cancelled; task 1: cancelled",
        ),
        (
            "succeeded unknown running",
            "unknown",
            "3 tasks: 1 running, 1 unknown, 1 succeeded; task 1: unknown",
        ),
    ],
)
def test_the_combined_status_of_tasks(tasks, state, reason):
    status = arrays.combined_status(
        {n: Status(State(one), reason=one) for n, one in enumerate(tasks.split())}
    )
    assert (status.state.value, status.reason) == (state, reason)


TASK = """
import os, sys
number = os.environ["SLURM_ARRAY_TASK_ID"]
open(os.environ["DEPLOYKIT_OUTPUT_DIR"] + "/number", "w").write(number)
print("task", number, flush=True)
sys.exit(3 if number == "1" else 0)
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(array=4, tasks=(1, 3)), None),
        (Options(tasks=(1,)), "requires slurm.array"),
        (Options(array=4, tasks=(1, 4)), "task 4 does not exist; the array has tasks 0 to 3"),
        (Options(array=4, tasks=(1, 1)), "lists task 1 more than once"),
    ],
)
def test_the_tasks_that_are_chosen_exist(options, message):
    spec = JobSpec(name="a", entrypoint=Entrypoint(script="train.py"), resources=Resources())
    problems = [one for one in slurm.check(spec, options) if one.path == "slurm.tasks"]
    assert [one.message for one in problems] == ([message] if message else [])


def test_chosen_tasks_are_recorded_and_counted_in_the_cost(tmp_path):
    options = Options(array=4, at_once=1, tasks=(3, 1), price="1 USD/node-hour")
    assert arrays.numbered(options) == "1,3"
    (tmp_path / "array").write_text(arrays.record(options))
    handle = Handle("slurm", "localhost", "7", "one", str(tmp_path))
    assert arrays.tasks(handle) == [1, 3]
    assert [task.id for task in arrays.task_handles(handle, [1, 3])] == ["7_1", "7_3"]
    spec = JobSpec(
        name="a",
        entrypoint=Entrypoint(script="train.py"),
        resources=Resources(time_limit=3600),
    )
    assert slurm.cost(spec, options).amount("likely") == 2


def test_a_requeue_removes_the_partial_copy_of_the_source(tmp_path):
    """An attempt that ends during ``cp`` leaves a part; the next has the same job id."""
    array, run = tmp_path / "array", tmp_path / "run"
    for folder in (array / "source", array / "tasks", run / "source.38"):
        folder.mkdir(parents=True)
    (array / "tasks" / "0").symlink_to(run)
    for name in ("a.py", "b.py"):
        (array / "source" / name).touch()
    (run / "source.38" / "a.py").touch()
    (run / "plan.sh").write_text(f"find {run}/source* -type f -printf '%P\\n'\n")
    text = paths.shipped("templates").joinpath("slurm_array.sh").read_text()
    env = {"PATH": os.environ["PATH"], "ARRAY_FOLDER": str(array), "SLURM_JOB_ID": "38"}
    env |= {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "37"}
    done = subprocess.run(["bash", "-c", text], env=env, check=True, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == ["a.py", "b.py"]


REQUEUED = """
import os, time
restart = os.environ["DEPLOYKIT_RESTART_COUNT"]
print("restart", restart, flush=True)
if os.environ["SLURM_ARRAY_TASK_ID"] == "1" and restart == "0":
    time.sleep(900)
"""


class TestOnACluster:
    pytestmark = real

    def test_an_array(self, cluster, make_plan, send, tmp_path):
        options = Options(array=3, at_once=2, extra={"hold": ""})
        handle = send(make_plan(TASK, options=options))
        (job,) = output("squeue", "--me", "--noheader", "--format=%i").split()
        assert job == f"{handle.id}_[0-2%2]"
        held = slurm.status([handle])[handle]
        assert held.reason.startswith("3 tasks: 3 queued; task 0: held by its owner")
        output("scontrol", "release", handle.id)
        status = ended(handle)
        assert (status.state, status.exit_code) == (State.FAILED, 3)
        assert status.reason == (
            "3 tasks: 2 succeeded, 1 failed; task 1: rank 0 exited with code 3"
        )
        folder = folder_of("one-1", tmp_path)
        for number in range(3):
            assert (folder / f"output/{number}/number").read_text() == str(number)
        lines = [line for line in slurm.logs(handle, follow=False) if line.rank == 0]
        assert sorted((line.task, line.text) for line in lines) == [
            (n, f"task {n}") for n in range(3)
        ]
        assert slurm.find("one-1", folder, "localhost") == handle

    def test_an_array_is_cancelled_as_a_whole(self, cluster, make_plan, send):
        options = Options(array=2, at_once=1)
        handle = send(make_plan("import time; time.sleep(900)", options=options))
        wait_for(lambda: slurm.status([handle])[handle].state is State.RUNNING)
        slurm.cancel(handle)
        status = ended(handle)
        assert (status.state, status.reason[:24]) == (State.CANCELLED, "2 tasks: 2 cancelled; ta")

    def test_one_task_is_requeued(self, cluster, make_plan, send, tmp_path):
        handle = send(make_plan(REQUEUED, options=Options(array=2)))
        statuses = []

        def reason():
            statuses.append(slurm.status([handle])[handle])
            return statuses[-1].reason

        wait_for(lambda: "1 running, 1 succeeded" in reason())
        log = folder_of("one-1", tmp_path) / "tasks/1/logs/node-0.log"
        wait_for(lambda: log.exists() and "restart 0" in log.read_text())
        output("scontrol", "requeue", f"{handle.id}_1")
        wait_for(lambda: "task 1:" in reason() and "restart 1 pending (request 1)" in reason())
        status = ended(handle)
        assert (status.state, status.reason) == (State.SUCCEEDED, "2 tasks: 2 succeeded")
        assert not any(one.state.final for one in statuses)
        tasks = folder_of("one-1", tmp_path) / "tasks"
        restarts = {
            task: sorted((tasks / task / "exit_records").glob("restart-*.json")) for task in "01"
        }
        assert restarts["0"] == []
        (restart,) = restarts["1"]
        assert json.loads(restart.read_text())["why"] == "request"
        lines = [
            (line.task, line.text) for line in slurm.logs(handle, follow=False) if line.rank == 0
        ]
        assert sorted(lines) == [(0, "restart 0"), (1, "restart 0"), (1, "restart 1")]
