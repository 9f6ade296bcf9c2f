"""Slurm's commands, run here or on a login node, and what they print when they fail."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from deploykit.backends.slurm import arrays, remote
from deploykit.backends.slurm.options import Options
from deploykit.lib import shell
from deploykit.lib.errors import BackendUnavailable, DeploykitError, SubmitRefused, TryAgain

LOCALHOST = "localhost"
"""The target of a run that is submitted from this machine."""
_SITE_DEFAULTS = ("account", "partition", "qos", "reservation", "constraint")
"""Options for which a variable such as ``SBATCH_ACCOUNT`` counts, unless the script sets them."""
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "DEPLOYKIT_HOME"}
_LAUNCHERS = ("SLURM", "SBATCH_", "SRUN_", "DEPLOYKIT_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_")
_RANKS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}
_PING_TIMEOUT = 10
"""Seconds for a query whose only purpose is to learn whether the controller answers."""


def clean_environment(text: str) -> list[str]:
    """The words before sbatch that unset the `unwanted` variables, for the script `text`."""
    return ["env", *(word for name in unwanted(os.environ, text) for word in ("-u", name))]


def unwanted(environ: Iterable[str], text: str) -> list[str]:
    """Names of variables that sbatch would pass on to the job, or prefer to the script's options.

    A submit from inside another job, or from one of its ranks, inherits many.
    """
    kept = _KEPT.union(site_variables(text))
    return sorted(
        name
        for name in environ
        if (name.startswith(_LAUNCHERS) or name in _RANKS) and name not in kept
    )


def site_variables(text: str) -> list[str]:
    """The variables that set what the script `text` leaves to the site's defaults."""
    left = (name for name in _SITE_DEFAULTS if f"#SBATCH --{name}=" not in text)
    return [f"SBATCH_{name.upper()}" for name in left]


def run(argv: Sequence[str], host: str | None = None) -> shell.Result:
    """Run a command of Slurm's here, or on the login node `host`, whatever its exit code.

    Raises BackendUnavailable when the command is missing or the connection fails.
    """
    if host is not None:
        return remote.run_slurm(host, argv)
    return shell.run(argv, env=query_environment(os.environ))


def output(argv: Sequence[str], host: str | None = None) -> str:
    """The standard output of a command; empty when the only job id in `argv` is unknown to Slurm.

    Raises BackendUnavailable when the command fails for another reason.
    """
    result = run(argv, host)
    if result.code == 0 or UNKNOWN_JOB in result.err:
        return result.out
    message = f"{argv[0]}: {in_one_line(result.err)}"
    raise BackendUnavailable(message, hint=UNREACHABLE_HINT)


def setting(name: str, host: str | None = None) -> str:
    """A setting of the cluster that commands here, or on `host`, talk to; empty where not set.

    Raises BackendUnavailable when the controller does not answer.
    """
    settings = output(["scontrol", "show", "config"], host)
    match = re.search(rf"^{name}\s*=\s*(\S+)", settings, re.MULTILINE)
    return match[1] if match else ""


def unreachable() -> str | None:
    """Why the controller of this machine's cluster would accept no job; None where it answers.

    `scontrol ping` answers at once where `sinfo` waits for 9 s; only `sinfo` proves who asks.
    """
    for argv in (["scontrol", "ping"], ["sinfo", "--noheader", "--format=%P"]):
        try:
            result = shell.run(argv, env=query_environment(os.environ), timeout=_PING_TIMEOUT)
        except BackendUnavailable as error:
            return str(error)
        if result.code or not result.out.strip():
            complaint = result.err or result.out.partition("\n")[0]
            return f"{argv[0]}: {in_one_line(complaint).rpartition('; ')[2]}"
    return None


def missing(absent: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Missing prerequisites for a submit from this machine; see `base.Capabilities.missing`."""
    over_ssh = "or set slurm.host and slurm.folder to submit over ssh"
    if absent:
        yield from ((name, f"run deploykit on a login node, {over_ssh}") for name in absent)
    elif complaint := unreachable():
        yield complaint, f"ask the site whether the cluster is up, {over_ssh}"


def node_names(options: Options) -> Collection[str]:
    """The names of all nodes of the cluster."""
    argv = ["sinfo", "--all", "--noheader", "--Node", "--format=%N"]
    return set(output(argv, options.host).split())


def query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for Slurm's query commands: no filters or formats of the user's, times in UTC.

    ``SLURM_BITSTR_LEN=0`` makes squeue print every task id of a job array:
    https://slurm.schedmd.com/squeue.html#OPT_SLURM_BITSTR_LEN
    """
    overrides = ("SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_TIME_FORMAT")
    kept = {name: value for name, value in environ.items() if not name.startswith(overrides)}
    return {**kept, "TZ": "UTC", "SLURM_BITSTR_LEN": "0"}


def wrong_cluster(folder: Path, host: str | None) -> str | None:
    """A sentence if commands talk to another cluster than the run's, or to none; else None."""
    task = arrays.task_of(folder)
    expected = arrays.text_of((task[0] if task else folder) / "cluster")
    if expected is None:
        return None
    try:
        actual = setting("ClusterName", host)
    except BackendUnavailable as error:
        return str(error)
    if expected == actual:
        return None
    return f"the run was submitted to the Slurm cluster {expected!r}, but this one is {actual!r}"


# --- complaints

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
        "Slurm has no record of a job in slurm.after; remove runs that already ended as required"
    ),
    "mail-type": "correct slurm.mail_type; `man sbatch` lists the events",
    "license": "correct slurm.licenses; `scontrol show licenses` lists them",
    "node name": "correct slurm.nodelist and slurm.exclude; `sinfo -N` lists the nodes",
    "reservation": "correct slurm.reservation; `scontrol show reservation` lists them",
    "(gres)": "lower resources.gpus_per_node, or change slurm.gres_style",
    "option '--": "correct slurm.extra; `sbatch --help` lists the options",
    "specification": "correct slurm.extra; `man sbatch` describes the options",
    "denied": "ask the site for access to this partition, account or reservation",
    "not permitted": "ask the site for access to this partition, account or reservation",
    "policy": "your account or QOS has reached a limit; `sacctmgr show qos` lists the limits",
}
"""Hints by a part of sbatch's complaint in lower case; the first match counts."""

_UNREACHABLE = (
    *("unable to contact slurm controller", "could not establish a configuration source"),
    *("connection refused", "communication connection failure", "protocol authentication error"),
)
_UNCERTAIN = ("socket timed out", "zero bytes were transmitted", "timed out", "connection reset")
_BUSY = ("temporarily unable", "try again", "resource temporarily unavailable")
UNKNOWN_JOB = "Invalid job id specified"
"""The complaint of a command about a job that Slurm has no record of."""


def in_one_line(err: str) -> str:
    """The error text of a command in one line, without the command's name."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line) for line in err.strip().splitlines()]
    return "; ".join(line.strip() for line in lines if line.strip()) or "no reason given"


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
    """Return whether the job may be queued although sbatch failed with this text."""
    return any(part in text.lower() for part in _UNCERTAIN)
