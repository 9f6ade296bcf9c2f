"""What can be seen to be wrong with a job for Slurm, without asking the cluster."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import fields

from deploykit import contract, paths, quoting
from deploykit.backends.slurm import sent
from deploykit.backends.slurm.options import Options
from deploykit.model import JobSpec, Problem

_STATE = "echo ~/.local/state/deploykit"
_LEAST_MEMORY = 1024**2

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
            *("nodelist", "exclude", "exclusive", "licenses"),
        )
    },
    "array": "`slurm.array`",
    "mail-type": "`slurm.mail_type`",
    "mail-user": "`slurm.mail_user`",
    "kill-on-invalid-dep": "`slurm.after`",
    **dict.fromkeys(
        ("clusters", "help", "parsable", "quiet", "test-only", "usage", "version"),
        "not possible",
    ),
    **dict.fromkeys(("wait", "wrap"), "not possible"),
}
"""Options of sbatch that `extra` may not name, and what stands for them."""

_WITH_VALUE = (
    *("acctg-freq", "batch", "bb", "bbf", "begin", "cluster-constraint", "comment", "container"),
    *("container-id", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline"),
    *("delay-boot", "dependency", "distribution", "export", "export-file", "extra"),
    *("extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus-per-socket", "gpus-per-task"),
    *("gres", "gres-flags", "hint", "input", "mcs-label", "mem-bind", "mem-per-cpu", "mem-per-gpu"),
    *("mincpus", "network", "nodefile", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket"),
    *("oom-kill-step", "power", "prefer", "priority", "profile", "segment", "sockets-per-node"),
    *("switches", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind"),
    *("tres-per-task", "uid", "wait-all-nodes", "wckey"),
)
"""Options that need a value: without one they take the next line for it (sbatch 22.05).

https://slurm.schedmd.com/sbatch.html
"""

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
    yield from _check_home(options)
    yield from _check_places(job)
    yield from _check_values(options)
    yield from _check_extra(job, options)
    yield from _check_after(options)
    yield from _check_array(options)
    yield from _check_container(job, options)
    yield from _check_numbers(job, options)
    for name in sorted(_BASH_OWN.intersection(job.env)):
        yield Problem(f"env.{name}", "bash keeps this variable for itself", "choose another name")


def _check_home(options: Options) -> Iterator[Problem]:
    folder, name = str(options.home), "slurm.folder" if options.host else "DEPLOYKIT_HOME"
    if _controls(folder) or _UNFIT.search(folder):
        yield Problem(
            "slurm.folder" if options.host else "",
            f"deploykit's folder {folder!r} holds a control character, % or \\, which Slurm "
            "cannot have in a path",
            f"set {name} to a plain folder that every node sees",
        )
    if options.host is None:
        if options.folder is not None:
            yield Problem("slurm.folder", "is for a host", "set slurm.host, or DEPLOYKIT_HOME")
        return
    if options.host.startswith("-"):
        yield Problem("slurm.host", "begins with a hyphen, like an option of ssh")
    if options.folder is None or not options.folder.startswith("/"):
        yield Problem(
            "slurm.folder",
            f"must be a whole path on {options.host}, for runs and bundles",
            f"for example what `{quoting.command('ssh', '--', options.host, _STATE)}` prints",
        )


def _check_places(job: JobSpec) -> Iterator[Problem]:
    for path, place in contract.locations(job).items():
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
        elif not value.strip(" ,") and not path.startswith("slurm.extra."):
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
    yield from ((f"slurm.modules[{n}]", value) for n, value in enumerate(options.modules))
    if options.container is not None:
        yield "slurm.container.image", options.container.image
        mounts = enumerate(options.container.mounts)
        yield from ((f"slurm.container.mounts[{n}]", value) for n, value in mounts)


def _check_extra(job: JobSpec, options: Options) -> Iterator[Problem]:
    own = dict(_OWN)
    if options.gres_style == "gres" and job.resources.gpus_per_node:
        own["gres"] = "`resources.gpus_per_node`"
    if options.after:
        own["dependency"] = "`slurm.after`"
    for name, value in options.extra.items():
        if not value and (longer := next((o for o in _WITH_VALUE if o.startswith(name)), None)):
            what = f"sbatch's --{longer} needs a value, or it would take the next option for one"
            yield Problem(f"slurm.extra.{name}", what, "give it a value, or leave it out")
        # sbatch takes the beginning of an option's name for the option
        taken = name if name in own else next((o for o in own if o.startswith(name)), None)
        if taken is not None:
            instead = own[taken]
            hint = f"use {instead}" if instead.startswith("`") else "remove it"
            what = f"sbatch's --{taken} is set by deploykit and cannot be chosen here"
            yield Problem(f"slurm.extra.{name}", what, hint)


def _check_after(options: Options) -> Iterator[Problem]:
    for run in options.after:
        if sent.job(paths.run_folder(run)) is None:
            yield Problem(
                f"slurm.after.{run}",
                "no run of that id was sent to Slurm from here",
                "`deploykit list` shows the runs",
            )


def _check_array(options: Options) -> Iterator[Problem]:
    if options.array is None and options.at_once is not None:
        yield Problem("slurm.at_once", "is for an array", "set slurm.array")


def _check_container(job: JobSpec, options: Options) -> Iterator[Problem]:
    """A comma or a colon in a folder would be read as the end of it."""
    if options.container is None:
        return
    if options.container.image.startswith("-"):
        yield Problem("slurm.container.image", "begins with a hyphen, like an option")
    for number, mount in enumerate(options.container.mounts):
        if "," in mount or mount.count(":") > 1 or not mount.startswith("/"):
            path, hint = f"slurm.container.mounts[{number}]", "/scratch, or /scratch:/data"
            yield Problem(path, f"{mount!r} is not FOLDER or FOLDER:INSIDE", f"for example {hint}")
    for path, place in {"": str(options.home), **contract.locations(job)}.items():
        if re.search("[,:]", place) and "://" not in place:
            message = f"a container cannot be given the folder {place}, with a comma or a colon"
            yield Problem(path, message, "choose another folder")


def _check_numbers(job: JobSpec, options: Options) -> Iterator[Problem]:
    limit, notice = job.resources.time_limit, options.signal_seconds
    if notice is not None and notice >= limit:
        yield Problem(
            "slurm.signal_seconds",
            f"a notice of {notice} s does not fit into a time limit of {limit} s",
            "lower it, or raise resources.time_limit",
        )
    memory = job.resources.memory
    if memory is not None and memory < _LEAST_MEMORY:
        yield Problem("resources.memory", "must be at least 1MiB on Slurm")


def _controls(text: str) -> bool:
    return any(unicodedata.category(character) == "Cc" for character in text)
