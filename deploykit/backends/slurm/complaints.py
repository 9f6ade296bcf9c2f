"""What Slurm's commands print when they fail: in one line, and as an error with a hint."""

from __future__ import annotations

import re

from deploykit.lib.errors import BackendUnavailable, DeploykitError, SubmitRefused, TryAgain

UNREACHABLE_HINT = "check that this is a login node of the cluster, and that the cluster is up"

_HINTS = {
    "invalid partition": "set slurm.partition to one that `sinfo -s` lists",
    "account": "set slurm.account; `sacctmgr show associations user=$USER` lists yours",
    "qos": "set slurm.qos; `sacctmgr show associations user=$USER` lists yours",
    "time limit": "lower resources.time_limit; `sinfo -o '%P %l'` lists the partitions' limits",
    "more processors": "lower resources.cpus_per_node or resources.nodes",
    "node count": "lower resources.nodes; `sinfo -s` lists the nodes of each partition",
    "memory specification": "lower resources.memory; `sinfo -N -o '%N %m'` lists MiB per node",
    "node configuration": "request less per node; `sinfo -N -o '%N %c %m %G'` lists the nodes",
    "invalid feature": "set slurm.constraint to features that `sinfo -o '%N %f'` lists",
    "dependency problem": (
        "Slurm has no record of a job in slurm.after; remove that run if it ended as required"
    ),
    "mail-type": "correct slurm.mail_type; `man sbatch` lists the events",
    "license": "correct slurm.licenses; `scontrol show licenses` lists them",
    "node name": "correct slurm.nodelist and slurm.exclude; `sinfo -N` lists the nodes",
    "reservation": "correct slurm.reservation; `scontrol show reservation` lists them",
    "(gres)": "lower resources.gpus_per_node, or try the other slurm.gres_style",
    "option '--": "correct slurm.extra; `sbatch --help` lists the options",
    "specification": "correct slurm.extra; `man sbatch` describes the options",
    "denied": "ask the site for access to this partition, account or reservation",
    "not permitted": "ask the site for access to this partition, account or reservation",
    "policy": "a limit of your account or quality of service is reached; `sacctmgr show qos`",
}
"""Hints by a part of sbatch's complaint in lower case; the first match counts."""

_UNREACHABLE = (
    *("unable to contact slurm controller", "could not establish a configuration source"),
    *("connection refused", "communication connection failure", "protocol authentication error"),
)
_UNCERTAIN = ("socket timed out", "zero bytes were transmitted", "timed out", "connection reset")
_BUSY = ("temporarily unable", "try again", "resource temporarily unavailable")
_UNKNOWN_JOB = "Invalid job id specified"


def in_one_line(err: str) -> str:
    """The error text of a command in one line, without the command's name."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line) for line in err.strip().splitlines()]
    return "; ".join(line.strip() for line in lines if line.strip()) or "no reason given"


def names_unknown_job(err: str) -> bool:
    """Whether a command failed because Slurm has no record of the job."""
    return _UNKNOWN_JOB in err


def error_for(text: str) -> DeploykitError:
    """The error for what sbatch printed: SubmitRefused, TryAgain or BackendUnavailable."""
    complaint, lower = in_one_line(text), text.lower()
    if any(part in lower for part in _UNREACHABLE):
        return BackendUnavailable(f"sbatch: {complaint}", hint=UNREACHABLE_HINT)
    if any(part in lower for part in (*_UNCERTAIN, *_BUSY)):
        return TryAgain(f"sbatch: {complaint}", hint="the cluster is busy; submit again")
    hint = next((hint for part, hint in _HINTS.items() if part in lower), None)
    return SubmitRefused(f"Slurm refused the job: {complaint}", hint=hint)


def is_uncertain(text: str) -> bool:
    """Whether the controller may have queued the job although sbatch failed."""
    return any(part in text.lower() for part in _UNCERTAIN)
