"""What Slurm says, read. The texts were recorded from Slurm 22.05; nothing runs here."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from deploykit.backends.slurm import sent, states, turns, watching
from deploykit.errors import BackendUnavailable
from deploykit.model import Handle, State, Status
from deploykit.shell import Result

SQUEUE = """\
37|PENDING|2026-11-21T03:15:17|2026-11-21T03:16:17|1|main|9|Dependency|run-d|/runs/run-d/source
35|PENDING|N/A|N/A|1|main|9|PartitionConfig|run-b|/runs/run-b/source
36|CONFIGURING|2026-11-21T02:15:18|2026-11-21T02:16:18|1|main|9|None|run-c|/runs/run-c/source
34|RUNNING|2026-11-21T02:15:18|2026-11-21T02:16:18|1|main|9|None|run-a|/runs/run-a/source
38_[0-7]|PENDING|N/A|N/A|1|main|9|Resources|a|name|/x|y
39|PENDING|N/A|N/A|1|main|9|ReqNodeNotAvail, UnavailableNodes:n1|run-e|/a|b/source
"""

SCONTROL = (
    "JobId={id} JobName={name} UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1000 Nice=0"
    " Account=(null) QOS=(null) JobState={state} Reason={reason} Dependency=(null)"
    " Requeue={requeue} Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code} RunTime=00:00:01"
    " TimeLimit=00:01:00 TimeMin=N/A SubmitTime=2026-11-21T02:15:17"
    " EligibleTime=2026-11-21T02:15:17 AccrueTime=2026-11-21T02:15:17"
    " StartTime=2026-11-21T02:15:18 EndTime=2026-11-21T02:15:19 Deadline=N/A"
    " PreemptEligibleTime=2026-11-21T02:15:18 PreemptTime=None SuspendTime=None"
    " Scheduler=Backfill Partition=main NodeList=n[1-2] NumNodes=2 Command=/x/JobState=RUNNING"
    " WorkDir=/a b/JobId=7 JobName=x UserId=y StdErr=/x StdOut=/x Power= \n"
)

SACCT = """\
40|COMPLETED|0:0|2026-11-21T02:15:18|2026-11-21T02:15:19|run-a
41|CANCELLED by 0|0:15|2026-11-21T02:15:18|2026-11-21T02:15:19|run-b
42|TIMEOUT|0:0|2026-11-21T02:15:18|2026-11-21T02:16:19|run-c
"""


def at(hour, minute, second):
    return datetime(2026, 11, 21, hour, minute, second, tzinfo=UTC)


def scontrol(state, **changes):
    usual = {"id": 34, "name": "run-a", "code": "0:0", "reason": "None", "requeue": 0}
    return SCONTROL.format(**{"state": state, **usual, **changes})


def one(text):
    (row,) = states.parse_scontrol(text)
    return states.status(row)


def test_squeue():
    rows = {row.id: row for row in states.parse_squeue(SQUEUE)}
    assert [states.status(rows[job]).state for job in ("37", "36", "34")] == [
        State.QUEUED,
        State.QUEUED,
        State.RUNNING,
    ]
    assert states.status(rows["34"]).started == at(2, 15, 18)
    assert states.status(rows["37"]).started is None
    assert states.status(rows["37"]).reason == "waits for the job that it depends on"
    assert states.status(rows["39"]).reason == (
        "nodes that it must have are down, drained or reserved (UnavailableNodes:n1)"
    )
    assert (rows["34"].name, rows["39"].folder) == ("run-a", "/a|b/source")


def test_commands():
    assert states.squeue_argv() == [
        *("squeue", "--me", "--noheader", "--format=%i|%T|%S|%e|%D|%P|%Q|%r|%j|%Z")
    ]
    assert "--states=all" in states.squeue_argv("run-a")
    assert states.scontrol_argv(["4"]) == ["scontrol", "--oneliner", "show", "job", "4"]
    assert states.scontrol_argv(["4", "5"]) == ["scontrol", "--oneliner", "show", "job"]
    assert "--jobs=4,5" in states.sacct_argv(["4", "5"])


def test_environment_has_none_of_the_users_filters():
    kept = states.environment({"SQUEUE_STATES": "PD", "SACCT_FORMAT": "x", "SLURM_CONF": "/x"})
    assert kept == {"SLURM_CONF": "/x", "TZ": "UTC", "SLURM_BITSTR_LEN": "0"}


@pytest.mark.parametrize(
    ("state", "code", "expected", "exit_code", "words"),
    [
        ("COMPLETED", "0:0", State.SUCCEEDED, 0, ""),
        ("FAILED", "7:0", State.FAILED, 7, ""),
        ("FAILED", "0:9", State.FAILED, 137, ""),
        ("FAILED", "143:0", State.FAILED, 143, ""),
        ("CANCELLED", "0:15", State.CANCELLED, None, "cancelled"),
        ("TIMEOUT", "0:0", State.FAILED, 124, "time limit"),
        ("OUT_OF_MEMORY", "0:125", State.FAILED, 137, "memory"),
        ("NODE_FAIL", "1:0", State.FAILED, 1, "a node failed"),
        ("PREEMPTED", "0:15", State.FAILED, 143, "preempted"),
        ("BOOT_FAIL", "0:0", State.FAILED, None, "boot"),
    ],
)
def test_ends(state, code, expected, exit_code, words):
    status = one(scontrol(state, code=code, reason="NonZeroExitCode"))
    assert (status.state, status.native, status.exit_code) == (expected, state, exit_code)
    assert words in status.reason
    assert (status.started, status.finished) == (at(2, 15, 18), at(2, 15, 19))


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL", "BOOT_FAIL"])
def test_a_job_that_slurm_starts_again_has_not_ended(state):
    status = one(scontrol(state, requeue=1))
    assert status.state is State.QUEUED
    assert "Slurm starts it again" in status.reason


@pytest.mark.parametrize("state", ["REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "PENDING"])
def test_a_job_in_the_queue_again_has_not_ended(state):
    assert one(scontrol(state)).state is State.QUEUED


def test_a_state_of_a_later_slurm():
    assert one(scontrol("DREAMING")) == Status(State.UNKNOWN, "DREAMING", "Slurm calls it DREAMING")


def test_no_state_is_forgotten():
    """The states of squeue(1), Slurm 22.05 to 24.11."""
    assert set(states._STATES) >= {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "CONFIGURING", "COMPLETING", "DEADLINE"),
        *("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "PREEMPTED", "RUNNING"),
        *("RESV_DEL_HOLD", "REQUEUE_FED", "REQUEUE_HOLD", "REQUEUED", "RESIZING", "REVOKED"),
        *("SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED", "TIMEOUT"),
    }


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("Resources", "waits for nodes to become free"),
        ("(Resources)", "waits for nodes to become free"),
        ("QOSMaxJobsPerUserLimit", "a limit of its quality of service is reached"),
        ("AssocGrpCpuLimit", "a limit of its account is reached (AssocGrpCpuLimit)"),
        ("ReqNodeNotAvail,_UnavailableNodes:n1", "(UnavailableNodes:n1)"),
        ("launch_failed_requeued_held", "a node could not start it, and it is held"),
        ("Something new", "Slurm says: Something new"),
        ("None", ""),
    ],
)
def test_reasons_are_sentences(reason, sentence):
    assert sentence in one(scontrol("PENDING", reason=reason)).reason


def test_a_failed_launch_says_what_to_look_at():
    status = one(scontrol("FAILED", code="0:53", reason="JobLaunchFailure"))
    assert status.exit_code is None
    assert "logs" in status.reason


def test_a_job_that_can_never_start_was_not_cancelled_by_anybody():
    status = one(scontrol("CANCELLED", reason="DependencyNeverSatisfied"))
    assert status.state is State.CANCELLED
    assert status.reason.startswith("the job that it depends on ended otherwise")


QUEUE = """\
30|main|12
35_[1-9%2]|main,other|9
36|other|99
40|main|9
50|main|10
nonsense
"""


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "37|PENDING|2026-11-21T03:15:17|N/A|2|main|9|Resources|a|/a",
            (
                "waits for 2 nodes of partition main; 3 jobs ahead; "
                "Slurm expects to start it at 2026-11-21 03:15 UTC"
            ),
        ),
        (
            "37|PENDING|N/A|N/A|1|big,other|9|Priority|a|/a",
            "waits for 1 node of partition big,other; 2 jobs ahead",
        ),
        (
            "37|PENDING|N/A|N/A|1|main|11|Priority|a|/a",
            "waits for 1 node of partition main; 1 job ahead",
        ),
        (
            "37|PENDING|N/A|N/A|1|main|13|Priority|a|/a",
            "waits for 1 node of partition main; no jobs ahead",
        ),
    ],
)
def test_the_place_in_the_queue(line, sentence):
    (row,) = states.parse_squeue(line)
    assert turns.in_line(row)
    assert turns.words(row, list(turns.parse(QUEUE))) == sentence


def test_a_held_job_has_no_place_in_the_queue():
    (row,) = states.parse_squeue("37|PENDING|N/A|N/A|2|main|9|JobHeldUser|a|/a")
    assert not turns.in_line(row)


def test_sacct():
    rows = [states.status(row) for row in states.parse_sacct(SACCT)]
    assert [row.state for row in rows] == [State.SUCCEEDED, State.CANCELLED, State.FAILED]
    assert [row.exit_code for row in rows] == [0, None, 124]


@pytest.mark.parametrize("text", ["", "\n", "x", "a|b|c", "JobId=x", "|||||\n"])
def test_nonsense_is_no_job(text):
    for parse in (states.parse_squeue, states.parse_scontrol, states.parse_sacct):
        assert [row for row in parse(text) if row.id] == []


# --- status over its sources, with the answers of Slurm's programs given


@pytest.fixture
def answers(monkeypatch):
    """Slurm's programs answer from this table; what was asked is kept in `asked`."""

    class Answers(dict):
        def __init__(self):
            super().__init__()
            self.asked = []

        def run(self, argv, _host=None):
            self.asked.append(argv[0])
            answer = self.get(argv[0], "")
            if isinstance(answer, Exception):
                raise answer
            return answer if isinstance(answer, Result) else Result(0, answer, "")

    table = Answers()
    monkeypatch.setattr(watching, "_run", table.run)
    return table


def handle(number, name, folder="/nowhere"):
    return Handle("slurm", "localhost", str(number), name, str(folder))


def end_file(folder, node, **content):
    (folder / "exit_records").mkdir(exist_ok=True)
    content = {"rank": None, "finished": "2026-11-21T02:15:19Z", "attempt": 0, **content}
    (folder / "exit_records" / f"node-{node}.json").write_text(json.dumps(content))


def test_many_runs_cost_one_call(answers):
    answers["squeue"] = SQUEUE
    wanted = [handle(34, "run-a"), handle(36, "run-c"), handle(37, "run-d")]
    found = watching.status(wanted)
    assert [found[h].native for h in wanted] == ["RUNNING", "CONFIGURING", "PENDING"]
    assert answers.asked == ["squeue"]


def test_ended_runs_cost_one_more(answers):
    answers["squeue"] = SQUEUE
    answers["scontrol"] = scontrol("COMPLETED", id=50, name="x") + scontrol(
        "FAILED", id=51, name="y", code="3:0"
    )
    wanted = [handle(34, "run-a"), handle(50, "x"), handle(51, "y")]
    found = watching.status(wanted)
    assert [found[h].exit_code for h in wanted] == [None, 0, 3]
    assert answers.asked == ["squeue", "scontrol"]


def test_an_id_that_went_to_another_job_is_not_the_run(answers):
    answers["squeue"] = SQUEUE
    ours = handle(34, "run-z")
    assert watching.status([ours])[ours].state is State.FAILED


def test_accounting_is_asked_last(answers):
    answers["sacct"] = SACCT
    ours = handle(42, "run-c")
    assert watching.status([ours])[ours].native == "TIMEOUT"


def test_the_trainers_own_code_and_reason(answers, tmp_path):
    answers["scontrol"] = scontrol("FAILED", code="1:0", reason="NonZeroExitCode")
    end_file(tmp_path, 0, exit_code=143, reason="stopped", finished="2026-11-21T02:15:19.5Z")
    end_file(tmp_path, 1, exit_code=7, reason="rank 3 ended with 7", rank=3)
    ours = handle(34, "run-a", tmp_path)
    status = watching.status([ours])[ours]
    assert (status.exit_code, status.reason) == (7, "rank 3 ended with 7")


def test_slurms_own_verdict_stands(answers, tmp_path):
    answers["scontrol"] = scontrol("TIMEOUT", code="0:0")
    end_file(tmp_path, 0, exit_code=143, reason="stopped")
    ours = handle(34, "run-a", tmp_path)
    assert watching.status([ours])[ours].exit_code == 124


@pytest.mark.parametrize(("code", "state"), [(0, State.SUCCEEDED), (7, State.FAILED)])
def test_a_forgotten_job_is_known_by_its_end_file(answers, tmp_path, code, state):
    answers["sacct"] = Result(1, "", "Slurm accounting storage is disabled\n")
    end_file(tmp_path, 0, exit_code=code, reason="it ended")
    ours = handle(34, "run-a", tmp_path)
    assert watching.status([ours])[ours] == Status(
        state, "ended", "it ended", code, None, at(2, 15, 19)
    )


def test_a_forgotten_job_without_a_word_has_ended(answers, tmp_path):
    ours = handle(34, "run-a", tmp_path)
    status = watching.status([ours])[ours]
    assert (status.state, status.native) == (State.FAILED, "forgotten")


def test_another_cluster_knows_nothing_of_the_run(answers, tmp_path):
    (tmp_path / watching.CLUSTER).write_text("here\n")
    answers["scontrol"] = "ClusterName             = there\n"
    ours = handle(34, "run-a", tmp_path)
    status = watching.status([ours])[ours]
    assert status.state is State.UNKNOWN
    assert "'here', and this is 'there'" in status.reason
    with pytest.raises(BackendUnavailable, match="'there'"):
        watching.find("run-a", tmp_path, "localhost")


def test_another_cluster_knows_nothing_of_an_array(answers, tmp_path):
    (tmp_path / watching.CLUSTER).write_text("here\n")
    sent.record_tasks(tmp_path, 2)
    answers["scontrol"] = "ClusterName             = there\n"
    ours = handle(34, "run-a", tmp_path)
    assert watching.status([ours])[ours].state is State.UNKNOWN
    answers["squeue"] = "34_[0-1%1]|PENDING|N/A|N/A|1|main|9|JobHeldUser|run-a|/a\n"
    assert watching.status([ours])[ours].reason.startswith("of 2 tasks 2 wait; task 0: held")


def test_a_silent_controller_is_no_verdict(answers, tmp_path):
    said = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    answers["squeue"] = Result(1, "", said)
    end_file(tmp_path, 1, exit_code=0, reason="it ended")
    ours = handle(34, "run-a", tmp_path)
    status = watching.status([ours])[ours]
    assert status.state is State.UNKNOWN
    assert "Unable to contact" in status.reason
    with pytest.raises(BackendUnavailable):
        watching.find("run-a", tmp_path, "localhost")


def test_find_prefers_the_job_that_claimed_the_run(answers, tmp_path):
    answers["squeue"] = "".join(
        f"{number}|RUNNING|N/A|N/A|1|main|9|None|{name}|{folder}/source\n"
        for number, name, folder in [
            (9, "run-b", tmp_path),
            (10, "run-a", "/somebody/elses"),
            (12, "run-a", tmp_path),
            (101, "run-a", tmp_path),
        ]
    )
    assert watching.find("run-a", tmp_path, "localhost").id == "12"
    (tmp_path / "claim").symlink_to("101")
    assert watching.find("run-a", tmp_path, "localhost").id == "101"
    assert watching.find("run-x", tmp_path / "other", "localhost") is None
