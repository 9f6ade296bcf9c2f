"""Output of Slurm's commands, recorded from Slurm 22.05."""

from __future__ import annotations

from datetime import UTC, datetime

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
