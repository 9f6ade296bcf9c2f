"""The `slurm` section of a job file, and what can be seen to be wrong with it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from deploykit import contract, paths
from deploykit.fields import NOT_EMPTY, Bounds, Help, Pattern
from deploykit.model import JobSpec, Problem

OPTION = Pattern(r"[A-Za-z][A-Za-z0-9-]+", "the long name of an sbatch option, without dashes")

LEAST_MEMORY = 1024**2


@dataclass(frozen=True)
class Restarts:
    """How often the job may be started again, by reason; the counts are kept apart."""

    time_limit: Annotated[
        int, Help("After its time limit, if the attempt has left a checkpoint."), Bounds(0, 10_000)
    ] = 100
    preemption: Annotated[int, Help("After a preemption."), Bounds(0, 10_000)] = 100
    node_failure: Annotated[int, Help("After the loss of a node."), Bounds(0, 10_000)] = 10
    error: Annotated[
        int,
        Help("After a rank has failed and torchrun's `retries` are used up."),
        Bounds(0, 10_000),
    ] = 0


@dataclass(frozen=True)
class Options:
    """The `slurm` section of a job file."""

    partition: Annotated[str | None, Help("Partition. Default: the site's.", example="gpu")] = None
    account: Annotated[str | None, Help("Account that pays. Default: yours.")] = None
    qos: Annotated[str | None, Help("Quality of service. Default: the site's.")] = None
    constraint: Annotated[
        str | None, Help("Features that the nodes must have.", example='"a100&nvlink"')
    ] = None
    reservation: Annotated[str | None, Help("Reservation to run in.")] = None
    nodelist: Annotated[str | None, Help("Nodes that must be used.", example="node[01-02]")] = None
    exclude: Annotated[str | None, Help("Nodes that must not be used.", example="node07")] = None
    exclusive: Annotated[bool, Help("Share the nodes with no other job.")] = False
    gres_style: Annotated[
        Literal["gpus-per-node", "gres"],
        Help("How this site wants GPUs asked for: `--gpus-per-node=N` or `--gres=gpu:N`."),
    ] = "gpus-per-node"
    python: Annotated[
        str | None,
        Help(
            "Python on the nodes that runs the trainer. Default: the one that runs deploykit.",
            example="/shared/venv/bin/python",
        ),
    ] = None
    setup: Annotated[
        tuple[str, ...],
        Help("Shell lines that the batch script runs before srun.", "[module load cuda]"),
    ] = ()
    signal_seconds: Annotated[
        int | None,
        Help(
            "Notice before the time limit, as SIGUSR2, in seconds; Slurm may give it up to 60 s "
            "early. Default: 90, or half of a short time limit."
        ),
        Bounds(1, 65535),
    ] = None
    restarts: Annotated[
        Restarts, Help("How often Slurm may start the job again, by reason. All 0: never.")
    ] = field(default_factory=Restarts)
    site: Annotated[
        str | None,
        Help(
            "Site profile to check against: a cluster's name or a file. On the cluster, "
            "`deploykit backends slurm --probe` writes one.",
            example="prod",
        ),
        NOT_EMPTY,
    ] = None
    extra: Annotated[
        Mapping[Annotated[str, OPTION], str],
        Help(
            "Any other options of sbatch; an empty value gives an option that takes none.",
            example='{mail-type: END, contiguous: ""}',
        ),
    ] = field(default_factory=dict)


_OWN = {
    **dict.fromkeys(("job-name", "chdir", "output", "error", "open-mode"), "deploykit's own"),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "`resources.nodes`"),
    "cpus-per-task": "`resources.cpus_per_node`",
    "mem": "`resources.memory`",
    **dict.fromkeys(("gpus", "gpus-per-node"), "`resources.gpus_per_node`"),
    "time": "`resources.time_limit`",
    "signal": "`slurm.signal_seconds`",
    **dict.fromkeys(("requeue", "no-requeue"), "`slurm.restarts`"),
    **{
        name: f"`slurm.{name}`"
        for name in (
            *("partition", "account", "qos", "constraint", "reservation"),
            *("nodelist", "exclude", "exclusive"),
        )
    },
    **dict.fromkeys(
        ("array", "clusters", "help", "parsable", "quiet", "test-only", "usage", "version"),
        "not possible",
    ),
    **dict.fromkeys(("wait", "wrap"), "not possible"),
}
"""Options of sbatch that `extra` may not name, and what stands for them."""

_BASH_OWN = frozenset(
    {
        *("BASHOPTS", "BASHPID", "BASH_ARGV0", "BASH_COMMAND", "BASH_SUBSHELL", "BASH_VERSINFO"),
        *("DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS"),
        *("HISTCMD", "LINENO", "PPID", "RANDOM", "SECONDS", "SHELLOPTS"),
        *("SHLVL", "SRANDOM", "UID", "_"),
    }
)
"""Variables that bash gives a value of its own, whatever a script exports."""

_UNFIT = re.compile(r"[%\\]")
"""In a path, Slurm replaces these by something else."""


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Every problem that can be seen without asking the cluster."""
    yield from _check_state()
    yield from _check_places(job)
    yield from _check_values(options)
    yield from _check_extra(job, options)
    yield from _check_numbers(job, options)
    for name in sorted(_BASH_OWN.intersection(job.env)):
        yield Problem(f"env.{name}", "bash keeps this variable for itself", "choose another name")


def _check_state() -> Iterator[Problem]:
    folder = str(paths.state())
    if _controls(folder) or _UNFIT.search(folder):
        yield Problem(
            "",
            f"deploykit's folder {folder!r} holds a control character, % or \\, which Slurm "
            "cannot have in a path",
            "set DEPLOYKIT_HOME to a plain folder that every node sees",
        )


def _check_places(job: JobSpec) -> Iterator[Problem]:
    for path, place in contract.places(job).items():
        if "://" in place:
            yield Problem(
                path,
                f"a Slurm node cannot use the address {place} as a folder",
                "copy it to a folder that every node sees, and name that, "
                f"for example with --set {path}=FOLDER",
            )


def _check_values(options: Options) -> Iterator[Problem]:
    """Values that would leave their #SBATCH line, or that say nothing."""
    for path, value in _texts(options):
        if _controls(value):
            yield Problem(
                path,
                f"{value!r} holds a line end or another control character, and would leave "
                "its #SBATCH line",
                "remove it",
            )
        elif not value and not path.startswith("slurm.extra."):
            yield Problem(path, "is empty", "leave it out for the site's default")
    for number, line in enumerate(options.setup):
        if "\r" in line:
            path = f"slurm.setup[{number}]"
            yield Problem(path, "holds a carriage return", "save it with Unix line ends")
    if (options.python or "").startswith("-"):
        yield Problem("slurm.python", "begins with a hyphen, like an option of srun")


def _texts(options: Options) -> Iterator[tuple[str, str]]:
    for item in fields(options):
        value = getattr(options, item.name)
        if isinstance(value, str):
            yield f"slurm.{item.name}", value
    yield from ((f"slurm.extra.{name}", value) for name, value in options.extra.items())


def _check_extra(job: JobSpec, options: Options) -> Iterator[Problem]:
    own = dict(_OWN)
    if options.gres_style == "gres" and job.resources.gpus_per_node:
        own["gres"] = "`resources.gpus_per_node`"
    for name in options.extra:
        # sbatch takes the beginning of an option's name for the option
        taken = name if name in own else next((o for o in own if o.startswith(name)), None)
        if taken is not None:
            instead = own[taken]
            hint = f"use {instead}" if instead.startswith("`") else "remove it"
            what = f"sbatch's --{taken} is set by deploykit and cannot be chosen here"
            yield Problem(f"slurm.extra.{name}", what, hint)


def _check_numbers(job: JobSpec, options: Options) -> Iterator[Problem]:
    limit, notice = job.resources.time_limit, options.signal_seconds
    if notice is not None and notice >= limit:
        yield Problem(
            "slurm.signal_seconds",
            f"a notice of {notice} s does not fit into a time limit of {limit} s",
            "lower it, or raise resources.time_limit",
        )
    memory = job.resources.memory
    if memory is not None and memory < LEAST_MEMORY:
        yield Problem("resources.memory", "must be at least 1MiB on Slurm")


def _controls(text: str) -> bool:
    return any(unicodedata.category(character) == "Cc" for character in text)
