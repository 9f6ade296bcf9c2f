"""Hostile output of Slurm's commands."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice

import pytest
from hypothesis import strategies as st

from deploykit.backends.slurm import arrays, commands, site, states
from deploykit.job.model import Status
from deploykit_node import cluster
from deploykit_node.restart import slurm_job
from tests.fuzz.foreign import TEXT, given, outcome, soup, spoiled

SQUEUE = (
    "7|RUNNING|2026-11-21T01:46:08|2026-11-21T02:46:08|2|main|4294901757|None|one-1|/a/source\n"
    "38_[5-7,9%2]|PENDING|N/A|N/A|1|a,b|12|Resources|one-1|/a/source\n"
)
SCONTROL = (
    "JobId=7 ArrayJobId=6 ArrayTaskId=1 JobName=one-1 UserId=me(1) GroupId=me(1) Priority=1"
    " JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0"
    " ExitCode=0:0 RunTime=00:00:10 TimeLimit=1-00:10:00 StartTime=2026-11-21T01:46:08"
    " EndTime=Unknown Deadline=N/A Partition=main NodeList=n[1-3,07] PreemptTime=None \n"
)
SACCT = "7|CANCELLED by 1000|0:15|2026-11-21T01:46:08|2026-11-21T01:46:09|one-1\n"
PENDING = "7|main|4294901757\n8_[1-3]|a,b|1\n"
CONFIG = """\
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = prod
GresTypes               = gpu,nvme
JobRequeue              = 1
MaxArraySize            = 1001
PreemptType             = preempt/none
SelectType              = select/cons_tres
SLURM_VERSION           = 23.11.4
"""
PARTITION = (
    "PartitionName=gpu AllowAccounts=vision,speech AllowQos=normal,long Default=NO MaxNodes=8 "
    "MaxTime=1-04:00:00 MinNodes=2 State=UP TotalNodes=3 PreemptMode=OFF\n"
)
NODE = (
    "NodeName=g1 CPUTot=96 AvailableFeatures=a100,ib Gres=gpu:a100:4(S:0-1),nvme:1 RealMemory=1 "
    "OS=Linux 6.1 #1 SMP State=MIXED Partitions=gpu NodeHostName=g1.example BootTime=None\n"
)
MANY = 70_000


@pytest.mark.parametrize(
    ("parse", "sample"),
    [
        (states.parse_squeue, SQUEUE),
        (states.parse_scontrol, SCONTROL),
        (states.parse_sacct, SACCT),
    ],
    ids=["squeue", "scontrol", "sacct"],
)
@given(data=st.data())
def test_every_parsed_job_has_a_status(parse, sample, data):
    text = data.draw(spoiled(sample) | soup(*sample.replace("|", " | ").split(" ")))
    rows = list(parse(text))
    assert len(rows) <= arrays.MAX_TASKS * max(1, text.count("\n"))
    for row in rows[:10]:
        status = states.status(row)
        assert isinstance(status, Status)
        assert status.exit_code is None or 0 <= status.exit_code < 256
        assert states.describe_position(row, states.Queue([]))


@pytest.mark.parametrize("priority", ["N/A", "\u00b2", "-1", "9" * 5000, ""])
def test_a_malformed_priority_is_ignored(priority):
    """Regression: each ended `status` with exit code 70."""
    text = SQUEUE.replace("4294901757", priority)
    assert next(states.parse_squeue(text)).priority == 0
    assert list(states.parse_pending(f"7|main|{priority}\n8|main|1\n")) == list(
        states.parse_pending("8|main|1\n")
    )


@given(text=spoiled(PENDING) | soup("|", "\n", "7", "main"))
def test_the_list_of_pending_jobs_is_parsed(text):
    row = states.Row("7", "one", "PENDING", partition="main", priority=5)
    assert "ahead" in states.describe_position(row, states.Queue(states.parse_pending(text)))


@given(job=spoiled("38_[5-7,9%2]", "38_[0-99999999999]", "38_[1-9,1-9]"))
def test_an_array_is_expanded_to_at_most_max_tasks(job):
    assert sum(1 for _ in islice(arrays.task_ids(job), arrays.MAX_TASKS + 1)) <= arrays.MAX_TASKS


def test_a_blank_state_is_empty():
    """Regression: it ended with exit code 70."""
    (row,) = states.parse_sacct("7| |0:15|2026-11-21T01:46:08|2026-11-21T01:46:09|one-1\n")
    assert row.native == ""


@given(
    config=spoiled(CONFIG), partitions=spoiled(PARTITION), nodes=spoiled(NODE, NODE * 3), now=TEXT
)
def test_a_site_is_parsed_or_refused(config, partitions, nodes, now):
    result = outcome(site.parse, config, partitions, nodes, "", now)
    if isinstance(result, site.Site):
        assert all(group.description for group in result.node_groups)


@given(text=TEXT | soup(":", "-", "1", "00") | spoiled("1-12:00:00"))
def test_a_time_limit_is_parsed_or_refused(text):
    result = outcome(site.seconds, text)
    assert result is None or result >= 0


@given(text=TEXT | soup("gpu", ":", "4", "(S:0-1)", ",") | spoiled("gpu:a100:4(S:0-1),nvme:1"))
def test_gpus_are_counted_or_refused(text):
    assert outcome(site.gpus, text) >= 0


@given(text=TEXT | spoiled("sbatch: error: Batch job submission failed: no\n"))
def test_a_complaint_becomes_a_sentence(text):
    assert commands.in_one_line(text)


@given(text=soup("n", "[", "]", "-", ",", "1", "07", "999") | spoiled("n[1-3,07],x"))
def test_a_list_of_hosts_is_expanded_or_refused(text):
    hosts = outcome(cluster.expand, text, ours=cluster.LaunchError)
    assert isinstance(hosts, Exception) or len(hosts) <= MANY


@pytest.mark.parametrize(
    "bomb", ["n[0-99999999999]", "n[1-999][1-999][1-999]", "n[0-9]" * 20, "n[1-9999]," * 99]
)
def test_a_list_of_hosts_that_would_fill_the_memory_is_refused(bomb):
    """Regression: each was expanded until the memory was full."""
    with pytest.raises(cluster.LaunchError):
        cluster.expand(bomb)


@given(text=spoiled(SCONTROL) | soup(*SCONTROL.split(" ")))
def test_a_job_is_parsed_on_its_node(text):
    job = outcome(slurm_job.parse, text, ours=cluster.LaunchError)
    assert isinstance(job, (slurm_job.Job, cluster.LaunchError))


def test_a_job_of_scontrol_has_its_fields():
    (row,) = states.parse_scontrol(SCONTROL)
    assert (row.id, row.name, row.native, row.code, row.requeued) == (
        *("6_1", "one-1", "RUNNING", "0:0"),
        True,
    )
    assert row.started == datetime(2026, 11, 21, 1, 46, 8, tzinfo=UTC)
