"""`states`, with texts recorded from Slurm 22.05."""

from __future__ import annotations

import random

import pytest

from deploykit.backends.slurm import states
from deploykit.backends.slurm.states import PendingJob, Queue
from deploykit.job.model import State, Status
from tests.backends.slurm.slurm_answers import SACCT, SQUEUE, at, scontrol


def one(text):
    (row,) = states.parse_scontrol(text)
    return states.status(row)


def test_squeue():
    rows = {row.id: row for row in states.parse_squeue(SQUEUE)}
    found = [states.status(rows[job]).state for job in ("37", "36", "34")]
    assert found == [State.QUEUED, State.QUEUED, State.RUNNING]
    assert states.status(rows["34"]).started == at(2, 15, 18)
    assert states.status(rows["37"]).started is None
    assert states.status(rows["37"]).reason == "waiting for the job that it depends on"
    assert states.status(rows["39"]).reason == (
        "required nodes are down, drained or reserved (UnavailableNodes:n1)"
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


@pytest.mark.parametrize(
    ("state", "code", "expected", "exit_code", "reason"),
    [
        ("COMPLETED", "0:0", State.SUCCEEDED, 0, ""),
        ("COMPLETED", "1:0", State.SUCCEEDED, None, ""),
        ("FAILED", "7:0", State.FAILED, 7, ""),
        ("FAILED", "255:0", State.FAILED, 255, ""),
        ("FAILED", "256:0", State.FAILED, None, ""),
        ("FAILED", "0:9", State.FAILED, 137, ""),
        ("FAILED", "0:31", State.FAILED, 159, ""),
        ("FAILED", "0:32", State.FAILED, None, ""),
        ("FAILED", "143:0", State.FAILED, 143, ""),
        ("CANCELLED", "0:15", State.CANCELLED, None, "cancelled"),
        ("TIMEOUT", "0:0", State.FAILED, 124, "time limit"),
        ("OUT_OF_MEMORY", "0:125", State.FAILED, 137, "memory"),
        ("NODE_FAIL", "1:0", State.FAILED, 1, "a node failed"),
        ("PREEMPTED", "0:15", State.FAILED, 143, "preempted"),
        ("BOOT_FAIL", "0:0", State.FAILED, None, "boot"),
    ],
)
def test_final_states(state, code, expected, exit_code, reason):
    status = one(scontrol(state, code=code, reason="NonZeroExitCode"))
    assert (status.state, status.native, status.exit_code) == (expected, state, exit_code)
    assert reason in status.reason
    assert (status.started, status.finished) == (at(2, 15, 18), at(2, 15, 19))


def test_a_job_that_was_cancelled_in_the_queue_never_started():
    text = scontrol("CANCELLED", code="0:0", reason="None")
    ended = text.replace("StartTime=2026-11-21T02:15:18", "StartTime=2026-11-21T02:15:19")
    assert (one(ended).started, one(ended).finished) == (None, at(2, 15, 19))


@pytest.mark.parametrize(
    ("state", "requeue"),
    [
        *(("PREEMPTED", 1), ("NODE_FAIL", 1), ("BOOT_FAIL", 1)),
        *(("REQUEUED", 0), ("REQUEUE_HOLD", 0), ("SPECIAL_EXIT", 0), ("PENDING", 0)),
    ],
)
def test_a_job_that_slurm_requeues_is_queued(state, requeue):
    status = one(scontrol(state, requeue=requeue))
    assert status.state is State.QUEUED
    assert ("Slurm requeues it" in status.reason) == bool(requeue)


def test_every_documented_state_is_known():
    """The states of squeue(1), Slurm 22.05 to 24.11; another one is named."""
    expected = Status(State.UNKNOWN, "DREAMING", "unknown Slurm state DREAMING")
    assert one(scontrol("DREAMING")) == expected
    assert set(states._STATES) >= {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "CONFIGURING", "COMPLETING", "DEADLINE"),
        *("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "PREEMPTED", "RUNNING"),
        *("RESV_DEL_HOLD", "REQUEUE_FED", "REQUEUE_HOLD", "REQUEUED", "RESIZING", "REVOKED"),
        *("SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED", "TIMEOUT"),
    }


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("Resources", "waiting for free nodes"),
        ("(Resources)", "waiting for free nodes"),
        ("QOSMaxJobsPerUserLimit", "a QOS limit has been reached"),
        ("AssocGrpCpuLimit", "an account limit has been reached (AssocGrpCpuLimit)"),
        ("ReqNodeNotAvail,_UnavailableNodes:n1", "(UnavailableNodes:n1)"),
        ("launch_failed_requeued_held", "held because a node could not launch the job"),
        ("Something new", "Slurm gives the reason Something new"),
        ("None", ""),
    ],
)
def test_a_reason_becomes_a_sentence(reason, sentence):
    assert sentence in one(scontrol("PENDING", reason=reason)).reason


NEVER = (
    *("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "BadConstraints"),
    *("AccountNotAllowed", "InvalidQOS", "DependencyNeverSatisfied"),
    *("QOSMaxNodePerJobLimit", "AssocMaxWallDurationPerJobLimit", "QOSMinGRES"),
)
WAITS = (
    *("None", "Resources", "Priority", "Dependency", "BeginTime", "JobHeldUser", "Licenses"),
    *("ReqNodeNotAvail,_UnavailableNodes:n1", "PartitionDown", "QOSMaxJobsPerUserLimit"),
    *("AssocGrpCpuLimit", "Nodes required for job are DOWN, DRAINED or reserved", "New reason"),
)


@pytest.mark.parametrize("reason", NEVER + WAITS)
def test_a_pending_job_is_blocked_if_it_can_never_start(reason):
    status = one(scontrol("PENDING", reason=reason))
    never = reason in NEVER
    assert status.state is (State.BLOCKED if never else State.QUEUED)
    assert status.reason.endswith(", so it can never start") == never
    assert not status.state.final
    assert status.started is None


@pytest.mark.parametrize(
    ("state", "code", "reason", "said"),
    [
        ("FAILED", "0:53", "JobLaunchFailure", "access the run's folder and logs"),
        ("CANCELLED", "0:0", "DependencyNeverSatisfied", "depends on did not end as required"),
    ],
)
def test_the_reason_of_a_job_that_slurm_itself_ended(state, code, reason, said):
    status = one(scontrol(state, code=code, reason=reason))
    assert (status.state.value, status.exit_code) == (state.lower(), None)
    assert said in status.reason


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
            "2026-11-21T03:15:17|N/A|2|main|9|Resources",
            "2 nodes in partition main; 3 jobs ahead; expected to start at 2026-11-21 03:15 UTC",
        ),
        ("N/A|N/A|1|big,other|9|Priority", "1 node in partition big,other; 2 jobs ahead"),
        ("N/A|N/A|1|main|11|Priority", "1 node in partition main; 1 job ahead"),
        ("N/A|N/A|1|main|13|Priority", "1 node in partition main; no jobs ahead"),
    ],
)
def test_the_position_in_the_queue(line, sentence):
    (row,) = states.parse_squeue(f"37|PENDING|{line}|a|/a")
    assert states.has_position(row)
    said = states.describe_position(row, Queue(states.parse_pending(QUEUE)))
    assert said == f"waiting for {sentence}"


def test_thousands_of_jobs_are_counted_as_one_by_one():
    chance = random.Random(1)
    pending = [
        PendingJob(str(n), frozenset(chance.sample("abc", chance.randint(1, 2))), n * 7 % 5)
        for n in range(200)
    ]
    queue = Queue(pending)
    for job in pending:
        row = states.Row(job.id, "n", "PENDING", partition=",".join(job.partitions))
        row = row._replace(priority=job.priority)
        before = (
            other
            for other in pending
            if not other.partitions.isdisjoint(job.partitions)
            and (-other.priority, int(other.id)) < (-job.priority, int(job.id))
        )
        assert queue.ahead(row) == sum(1 for _ in before)


def test_jobs_without_a_position_in_the_queue():
    """One is held, the other was requeued after squeue: scontrol prints no partition."""
    (row,) = states.parse_squeue("37|PENDING|N/A|N/A|2|main|9|JobHeldUser|a|/a")
    assert not states.has_position(row)
    (row,) = states.parse_scontrol(scontrol("PENDING", reason="Resources"))
    assert not states.has_position(row)
    assert states.status(row).reason == "waiting for free nodes"


def test_sacct():
    """A name may hold a bar; a preempted job that only the accounts know has ended."""
    more = "43|PREEMPTED|0:15|2026-11-21T02:15:18|2026-11-21T02:15:19|run|a\n"
    rows = list(states.parse_sacct(SACCT + more))
    statuses = [states.status(row) for row in rows]
    found = [status.state.value for status in statuses]
    assert found == ["succeeded", "cancelled", "failed", "failed"]
    assert [status.exit_code for status in statuses] == [0, None, 124, 143]
    assert (rows[3].id, rows[3].name) == ("43", "run|a")


def test_the_id_of_a_task_is_that_of_its_array_and_its_number():
    (job,) = states.parse_scontrol(scontrol("RUNNING"))
    (task,) = states.parse_scontrol(scontrol("RUNNING", id="41 ArrayJobId=38 ArrayTaskId=5"))
    assert (job.id, task.id) == ("34", "38_5")


@pytest.mark.parametrize(("text", "priority"), [("9", 9), ("0", 0), ("N/A", 0)])
def test_a_priority_that_is_no_number_is_the_lowest(text, priority):
    (row,) = states.parse_squeue(f"37|PENDING|N/A|N/A|1|main|{text}|Priority|a|/a")
    assert row.priority == priority


@pytest.mark.parametrize(
    ("reasons", "state", "text"),
    [
        ([], State.RUNNING, ""),
        (["preemption"], State.RUNNING, "restart 1 (preemption 1)"),
        (["preemption"], State.QUEUED, "restart 1 pending (preemption 1)"),
        (["node_failure"], State.STOPPING, "restart 1 pending (node failure 1)"),
        (["request"], State.SUCCEEDED, "after 1 restart (request 1)"),
        (
            ["time_limit", "preemption", "time_limit"],
            State.FAILED,
            "after 3 restarts (time limit 2, preemption 1)",
        ),
        (["request", "request"], State.CANCELLED, "after 2 restarts (request 2)"),
    ],
)
def test_restarts_are_counted_by_reason(reasons, state, text):
    assert states.restarted(reasons, state) == text


@pytest.mark.parametrize(
    "text", ["", "\n", "x", "a|b|c", "JobId=x", "|||||\n", "1|2|3|4|5", "||||||||"]
)
def test_malformed_lines_are_skipped(text):
    for parse in (states.parse_squeue, states.parse_scontrol, states.parse_sacct):
        assert [row for row in parse(text) if row.id] == []
