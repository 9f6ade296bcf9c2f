"""Run Slurm's commands, on this machine or on a login node."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from deploykit import shell
from deploykit.errors import BackendUnavailable

LOCALHOST = "localhost"
"""The target of a run that is submitted from this machine."""

UNREACHABLE_HINT = "check that this is a login node of the cluster, and that the cluster is up"

_UNKNOWN_JOB = "Invalid job id specified"


def run(argv: Sequence[str], host: str | None = None) -> shell.Result:
    """Run a command of Slurm's here, or on the login node `host`, whatever its exit code.

    Raises BackendUnavailable when the command is missing or the connection fails.
    """
    if host is not None:
        from deploykit.backends.slurm import ssh  # only runs with a host need it

        return ssh.run_slurm(host, argv)
    return shell.run(argv, env=environment(os.environ))


def output(argv: Sequence[str], host: str | None = None) -> str:
    """The standard output of a command; empty when the only job id in `argv` is unknown to Slurm.

    Raises BackendUnavailable when the command fails for another reason.
    """
    result = run(argv, host)
    if result.code == 0 or names_unknown_job(result.err):
        return result.out
    raise BackendUnavailable(f"{argv[0]}: {complaint(result.err)}", hint=UNREACHABLE_HINT)


def cluster_name(host: str | None = None) -> str:
    """The name of the cluster that commands here, or on `host`, talk to.

    Raises BackendUnavailable when the controller does not answer.
    """
    settings = output(["scontrol", "show", "config"], host)
    match = re.search(r"^ClusterName\s*=\s*(\S+)", settings, re.MULTILINE)
    return match[1] if match else ""


def names_unknown_job(err: str) -> bool:
    """Whether a command failed because Slurm has no record of the job."""
    return _UNKNOWN_JOB in err


def complaint(err: str) -> str:
    """The error text of a Slurm command in one line, without the command's name."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line) for line in err.strip().splitlines()]
    return "; ".join(line.strip() for line in lines if line.strip()) or "no reason given"


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for Slurm's query commands: no filters or formats of the user's, times in UTC.

    ``SLURM_BITSTR_LEN=0`` makes squeue print every task id of a job array:
    https://slurm.schedmd.com/squeue.html#OPT_SLURM_BITSTR_LEN
    """
    overrides = ("SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_TIME_FORMAT")
    kept = {name: value for name, value in environ.items() if not name.startswith(overrides)}
    return {**kept, "TZ": "UTC", "SLURM_BITSTR_LEN": "0"}
