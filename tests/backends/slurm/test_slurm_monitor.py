"""`jobs.status`, with canned answers of Slurm's commands."""

from __future__ import annotations

import json

import pytest

from deploykit.backends.slurm import commands, jobs
from deploykit.cli import main as cli
from deploykit.job.model import Handle, State, Status
from deploykit.lib.shell import Result
from deploykit.run import registry
from deploykit.run.registry import Run
from tests.backends.slurm.slurm_answers import SACCT, SQUEUE, at, scontrol


@pytest.fixture
def answers(monkeypatch):
    """The answers of Slurm's commands, by name; `calls` lists the commands that were run."""

    class Answers(dict):
        def __init__(self):
            super().__init__()
            self.calls = []

        def run(self, argv, _host=None):
            self.calls.append(argv[0])
            answer = self.get(argv[0], "")
            if isinstance(answer, Exception):
                raise answer
            return answer if isinstance(answer, Result) else Result(0, answer, "")

    table = Answers()
    monkeypatch.setattr(commands, "run", table.run)
    return table


def handle(number, name, folder="/nowhere"):
    return Handle("slurm", "localhost", str(number), name, str(folder))


def status_of(folder):
    """The status of the run `run-a`, job 34, with this folder."""
    run = handle(34, "run-a", folder)
    return jobs.status([run])[run]


def exit_record(folder, node, **content):
    (folder / "exit_records").mkdir(exist_ok=True)
    content = {"rank": None, "finished": "2026-11-21T02:15:19Z", "attempt": 0, **content}
    (folder / "exit_records" / f"node-{node}.json").write_text(json.dumps(content))


def process_record(folder, rank, attempt=0):
    content = {"host": "n1", "python": "python", "libraries": "", "attempt": attempt}
    (folder / "exit_records" / f"process-{rank}.json").write_text(json.dumps(content))


def test_many_runs_cost_one_squeue_and_those_that_ended_one_scontrol(answers):
    answers["squeue"] = SQUEUE
    handles = [handle(34, "run-a"), handle(36, "run-c"), handle(37, "run-d")]
    natives = [status.native for status in jobs.status(handles).values()]
    assert natives == ["RUNNING", "CONFIGURING", "PENDING"]
    assert answers.calls == ["squeue"]
    completed = scontrol("COMPLETED", id=50, name="x")
    answers["scontrol"] = completed + scontrol("FAILED", id=51, name="y", code="3:0")
    statuses = jobs.status([handle(34, "run-a"), handle(50, "x"), handle(51, "y")])
    assert [status.exit_code for status in statuses.values()] == [None, 0, 3]
    assert answers.calls == ["squeue", "squeue", "scontrol"]


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ({}, "waiting for the job that it depends on"),
        ({"prep": "succeeded"}, "waiting for run prep"),
        ({"prep": "succeeded", "data": "ended"}, "waiting for runs prep, data"),
    ],
)
def test_a_run_that_waits_for_others_names_them(answers, tmp_path, after, reason):
    answers["squeue"] = SQUEUE
    (tmp_path / "job.json").write_text(json.dumps({"name": "d", "slurm": {"after": after}}))
    waiting = handle(37, "run-d", tmp_path)
    assert jobs.status([waiting])[waiting].reason == reason


@pytest.mark.parametrize(
    ("job", "name", "native"), [(34, "run-z", "no record"), (42, "run-c", "TIMEOUT")]
)
def test_a_job_is_known_by_its_name_and_sacct_is_queried_last(answers, job, name, native):
    answers |= {"squeue": SQUEUE, "sacct": SACCT}
    run = handle(job, name)
    assert jobs.status([run])[run].native == native


def test_the_exit_code_and_reason_of_the_first_failure(answers, tmp_path):
    answers["scontrol"] = scontrol("FAILED", code="1:0", reason="NonZeroExitCode")
    exit_record(tmp_path, 0, exit_code=143, reason="stopped", finished="2026-11-21T02:15:19.5Z")
    exit_record(tmp_path, 1, exit_code=7, reason="rank 3 ended with 7", rank=3)
    status = status_of(tmp_path)
    assert (status.exit_code, status.reason) == (7, "rank 3 ended with 7")


def test_a_state_of_slurms_keeps_its_exit_code(answers, tmp_path):
    answers["scontrol"] = scontrol("TIMEOUT", code="0:0")
    exit_record(tmp_path, 0, exit_code=143, reason="stopped")
    assert status_of(tmp_path).exit_code == 124


@pytest.mark.parametrize("native", ["TIMEOUT", "FAILED", "NODE_FAIL"])
def test_a_run_has_succeeded_if_every_rank_had_exited_with_0(answers, tmp_path, native):
    """Slurm ends a job that has reached its time limit while its nodes are cleaned up."""
    answers["scontrol"] = scontrol(native, code="0:0")
    reason = "every rank exited with code 0"
    for node in range(2):
        finished = f"2026-11-21T02:15:1{node}.500Z"
        exit_record(tmp_path, node, exit_code=0, reason=reason, finished=finished, ranks={node: 0})
        process_record(tmp_path, node)
    status = status_of(tmp_path)
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0)
    assert status.reason == f"{reason}; Slurm ended the job afterwards ({native})"


@pytest.mark.parametrize("case", ["unfinished rank", "after the signal", "an earlier attempt"])
def test_a_run_has_not_succeeded_if_a_rank_was_ended_by_slurm(answers, tmp_path, case):
    answers["scontrol"] = scontrol("TIMEOUT", code="0:0")  # at 02:15:19
    late = case == "after the signal"
    finished = "2026-11-21T02:15:21Z" if late else "2026-11-21T02:15:11Z"
    exit_record(tmp_path, 0, exit_code=0, reason="well", finished=finished, ranks={0: 0})
    process_record(tmp_path, 0)
    if case == "unfinished rank":
        process_record(tmp_path, 1)
    if case == "an earlier attempt":
        (tmp_path / "exit_records" / "attempt.json").write_text('{"attempt": 1, "logs": {}}')
        process_record(tmp_path, 0, attempt=1)
    status = status_of(tmp_path)
    assert (status.state, status.exit_code) == (State.FAILED, 124)


@pytest.mark.parametrize(("code", "state"), [(0, State.SUCCEEDED), (7, State.FAILED)])
def test_the_status_without_slurm_is_that_of_the_exit_record(answers, tmp_path, code, state):
    answers["sacct"] = Result(1, "", "Slurm accounting storage is disabled\n")
    exit_record(tmp_path, 0, exit_code=code, reason="it ended")
    assert status_of(tmp_path) == Status(
        state, "exit record", "it ended", code, None, at(2, 15, 19)
    )


def test_a_job_without_any_record_has_failed(answers, tmp_path):
    status = status_of(tmp_path)
    assert (status.state, status.native) == (State.FAILED, "no record")


def test_on_another_cluster_the_status_is_unknown(answers, tmp_path):
    (tmp_path / "cluster").write_text("here\n")
    answers["scontrol"] = "ClusterName             = there\n"
    status = status_of(tmp_path)
    assert status.state is State.UNKNOWN
    assert "'here', but this one is 'there'" in status.reason
    (tmp_path / "array").write_text("2\n")
    assert status_of(tmp_path).state is State.UNKNOWN
    answers["squeue"] = "34_[0-1%1]|PENDING|N/A|N/A|1|main|9|JobHeldUser|run-a|/a\n"
    assert status_of(tmp_path).reason.startswith("2 tasks: 2 queued; task 0: held")


def test_without_an_answer_the_status_is_unknown(answers, tmp_path):
    text = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    answers["squeue"] = Result(1, "", text)
    exit_record(tmp_path, 1, exit_code=0, reason="it ended")
    status = status_of(tmp_path)
    assert status.state is State.UNKNOWN
    assert "Unable to contact" in status.reason


def test_a_job_that_ends_before_its_launchers_says_why(answers, tmp_path):
    failed = answers["scontrol"] = scontrol("FAILED", code="78:0", reason="NonZeroExitCode")
    killed = "all processes were killed before any process recorded a reason"
    assert status_of(tmp_path).reason == killed
    why = "the job cannot start: module load cuda/99 failed (slurm.modules)"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/slurm.log").write_text(f"module: not found\ndeploykit: {why}\n")
    status = status_of(tmp_path)
    assert (status.state, status.exit_code, status.reason) == (State.FAILED, 78, why)
    (tmp_path / "array").write_text("2\n")
    task = "JobId={} ArrayJobId=34 ArrayTaskId={} JobName="
    answers["scontrol"] = "".join(
        failed.replace("JobId=34 JobName=", task.format(34 + n, n)) for n in (0, 1)
    )
    (tmp_path / "logs/slurm-0.log").write_text(f"deploykit: {why}\n")
    assert status_of(tmp_path).reason == f"2 tasks: 2 failed; task 0: {why}"


def test_status_lists_the_tasks_of_an_array(answers, tmp_path, capsys):
    """Task 0 has ended with two files, task 1 has failed, task 2 waits; as text and as JSON."""
    (tmp_path / "array").write_text("3\n")
    for task, code in enumerate((0, 3)):
        records = tmp_path / f"tasks/{task}/exit_records"
        records.mkdir(parents=True)
        end = {"exit_code": code, "reason": f"rank 0 exited with {code}", "rank": 0, "attempt": 0}
        end["finished"] = "2026-11-21T02:15:19Z"
        (records / "node-0.json").write_text(json.dumps(end))
    none = {"folder": "/x", "count": 0, "bytes": 0, "largest": []}
    record = {"working_folder": none, "output": {**none, "count": 2}, "checkpoints": none}
    written = tmp_path / "tasks/0/exit_records/written.json"
    written.write_text(json.dumps({**record, "outputs": []}))
    answers["squeue"] = "38_2|PENDING|N/A|N/A|1|main|9|Resources|d|/x/source\n"
    row = Run("d", "d", "slurm", "localhost", str(tmp_path), "", "", None, registry.now(), "")
    registry.add(row)
    registry.confirm("d", "38")
    assert cli.main(["status", "d"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  task")]
    assert lines[0].startswith("  task 0: succeeded, exit code 0, 2 files")
    assert lines[1].startswith("  task 1: failed, exit code 3: rank 0 exited with 3")
    assert lines[2].startswith("  task 2: queued: waiting for 1 node in partition main")
    assert cli.main(["status", "d", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    found = [(task["state"], task["files"]) for task in shown["tasks"]]
    assert found == [("succeeded", 2), ("failed", None), ("queued", None)]
