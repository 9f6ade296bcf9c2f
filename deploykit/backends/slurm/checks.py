"""The problems of a `slurm` section that are found without the cluster."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.backends.slurm import arrays, script
from deploykit.backends.slurm.options import Options
from deploykit.job import checks, environments
from deploykit.job.model import JobSpec, Problem
from deploykit.lib import paths, shell
from deploykit.lib.errors import NotFound
from deploykit.lib.paths import is_address

_NOT_SUPPORTED = "not supported"

_RESERVED = {
    **dict.fromkeys(("job-name", "chdir", "output", "error", "open-mode"), _NOT_SUPPORTED),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "`resources.nodes`"),
    "cpus-per-task": "`resources.cpus_per_node`",
    "mem": "`resources.memory`",
    **dict.fromkeys(("gpus", "gpus-per-node"), "`resources.gpus_per_node`"),
    "time": "`resources.time_limit`",
    "signal": "`slurm.signal_seconds`",
    **dict.fromkeys(("requeue", "no-requeue"), "`slurm.restarts`"),
    "array": "`slurm.array`",
    "mail-type": "`slurm.mail_type`",
    "mail-user": "`slurm.mail_user`",
    "kill-on-invalid-dep": "`slurm.after`",
    **dict.fromkeys(("clusters", "help", "parsable", "quiet", "test-only"), _NOT_SUPPORTED),
    **dict.fromkeys(("usage", "version", "wait", "wrap"), _NOT_SUPPORTED),
    **{
        name: f"`slurm.{name}`"
        for name in (
            *("partition", "account", "qos", "constraint", "reservation"),
            *("nodelist", "exclude", "exclusive", "licenses"),
        )
    },
}
"""Options of sbatch that `slurm.extra` may not set, and what sets them instead."""

_SRUN_RESERVED = (
    *("chdir", "container-image", "container-mounts", "container-workdir", "cpus-per-task"),
    *("error", "export", "immediate", "input", "jobid", "kill-on-bad-exit", "label", "multi-prog"),
    *("no-kill", "nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"),
    *("preserve-env", "pty", "relative", "unbuffered", "wait"),
)
"""Options of srun that `slurm.srun` may not set. https://slurm.schedmd.com/srun.html"""

_REQUIRE_VALUE = (
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
"""Options that require a value: without one, sbatch 22.05 reads the next line as the value.

https://slurm.schedmd.com/sbatch.html
"""

_BASH_VARIABLES = {
    *("BASHOPTS", "BASHPID", "BASH_ARGV0", "BASH_COMMAND", "BASH_SUBSHELL", "BASH_VERSINFO"),
    *("DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "HISTCMD"),
    *("LINENO", "PPID", "RANDOM", "SECONDS", "SHELLOPTS", "SHLVL", "SRANDOM", "UID", "_"),
}
"""Variables whose values bash sets itself, whatever a script exports."""


_SHOW_STATE_FOLDER = "echo ~/.local/state/deploykit"
_MIN_MEMORY = 1024**2
_CONTROL = r"[\x00-\x1f\x7f-\x9f]"


def bills(options: Options) -> bool:
    """Return whether the site charges for its resources."""
    return options.price is not None


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Yield every problem that can be found without the cluster; reads a site profile if named."""
    installed = script.on_nodes(job, options)
    yield from _check_home(options)
    yield from _check_locations(job, options)
    yield from backend.check_checkpoint_bucket(job)
    yield from _check_checkpoint_folder(job, options)
    yield from _check_python(job, options, installed)
    yield from backend.check_ranks(job)
    yield from _check_values(options)
    yield from _check_extra(job, options)
    yield from _check_srun(options)
    for run in options.after:
        if arrays.job_id(paths.run_folder(run)) is None:
            message = "no run with this id was submitted to Slurm from this machine"
            yield Problem(f"slurm.after.{run}", message, "`deploykit list` shows your runs")
    yield from _check_container(job, options)
    yield from _check_array(job, options)
    yield from _check_environment(job, options, installed)
    limit, notice = job.resources.time_limit, options.signal_seconds
    if notice is not None and notice >= limit:
        message = f"{notice} s must be less than the time limit of {limit} s"
        hint = "decrease it, or increase resources.time_limit"
        yield Problem("slurm.signal_seconds", message, hint)
    if job.resources.memory is not None and job.resources.memory < _MIN_MEMORY:
        yield Problem("resources.memory", "must be at least 1MiB on Slurm")
    for name in sorted(_BASH_VARIABLES.intersection(job.env)):
        yield Problem(f"env.{name}", "is set by bash and cannot be overridden", "rename it")
    if options.site is not None:
        from deploykit.backends.slurm import site  # few jobs name a profile

        try:
            yield from site.problems(job, options, site.load(options.site))
        except NotFound as error:
            yield Problem("slurm.site", str(error), error.hint)


def check_function(options: Options) -> Iterator[Problem]:
    """Yield the settings with which no result of a function would come back."""
    for name in ("host", "array"):
        if getattr(options, name):
            hint = "submit a script instead of a function"
            yield Problem(f"slurm.{name}", "is not supported for functions", hint)


def _check_home(options: Options) -> Iterator[Problem]:
    home, name = str(options.home), "slurm.folder" if options.host else "DEPLOYKIT_HOME"
    if re.search(rf"{_CONTROL}|[%\\]", home):  # Slurm replaces these in a path
        yield Problem(
            "slurm.folder" if options.host else "",
            f"deploykit's folder {home!r} contains a control character, % or \\, which Slurm does "
            "not accept in paths",
            f"set {name} to a folder without such characters on a file system shared with the "
            "nodes",
        )
    if options.host is None:
        if options.folder is not None:
            hint = "set slurm.host, or use DEPLOYKIT_HOME"
            yield Problem("slurm.folder", "requires slurm.host", hint)
        return
    if options.host.startswith("-"):
        yield Problem("slurm.host", "starts with a hyphen, so ssh would read it as an option")
    if options.folder is None or not options.folder.startswith("/"):
        yield Problem(
            "slurm.folder",
            f"an absolute path on {options.host} is required for runs and bundles",
            "for example the output of "
            f"`{shell.command('ssh', '--', options.host, _SHOW_STATE_FOLDER)}`",
        )


def _check_locations(job: JobSpec, options: Options) -> Iterator[Problem]:
    yield from backend.check_addresses(
        job,
        "{location} is not a folder, which the slurm backend requires",
        "copy the data to a shared folder, and pass --set {path}=FOLDER",
    )
    if options.host is None:
        for missing in backend.missing_data(job):
            yield missing._replace(severity="warning")
        return
    for path, location in backend.locations(job).items():
        if Path(location).is_relative_to(job.source):
            message = f"{location} is in the source folder on this machine"
            yield Problem(path, message, f"use a path on {options.host}", severity="warning")


def _check_checkpoint_folder(job: JobSpec, options: Options) -> Iterator[Problem]:
    folder, path = options.checkpoint_folder, "slurm.checkpoint_folder"
    if folder is None:
        return
    if not folder.startswith(("/", "$")):
        hint = "use an absolute path, or one that starts with a variable such as $SLURM_TMPDIR"
        yield Problem(path, f"{folder} is not an absolute path", hint)
    if backend.checkpoint_bucket(job) is None:
        message = "requires checkpoints in a bucket; other nodes cannot read a node-local folder"
        yield Problem(path, message, "set checkpoints: s3://BUCKET/PREFIX, or remove it")
    if options.container is not None and folder.startswith("$"):
        message = f"{folder} cannot be mounted in the container; only the node knows its path"
        yield Problem(path, message, "use an absolute path")


def _check_python(job: JobSpec, options: Options, installed: object) -> Iterator[Problem]:
    """The Python of the job: on this machine, if it is the one that the nodes would use too."""
    same_files = options.host is None and options.container is None
    if options.python is not None and not options.python.startswith(("/", "~", "-")):
        if "/" in options.python:
            message = f"{options.python} is relative, but the job starts in a copy of the source"
            yield Problem("slurm.python", message, "use an absolute path on the nodes")
    elif same_files and options.python and not os.path.exists(paths.expanded(options.python)):  # noqa: PTH110 - too long
        message = f"{options.python} was not found on this machine; it must exist on the nodes"
        yield Problem("slurm.python", message, severity="warning")
    python = None if options.python or options.setup or options.modules else sys.executable
    if installed:
        python = None
    elif job.environment is not None:
        python = environments.python(job.environment)
    local = Path(python) if same_files and python else None
    yield from backend.check_program(job, local)
    if local:
        for problem in (*checks.check_torch(job, local), *checks.check_boto3(job, local)):
            yield problem._replace(severity="warning")  # the nodes may have another Python there


def _check_values(options: Options) -> Iterator[Problem]:
    """Values that are empty, or that would break out of their #SBATCH line."""
    for path, value in _texts(options):
        if re.search(_CONTROL, value):
            yield Problem(
                path,
                f"{value!r} contains a line break or another control character, which would end "
                "its #SBATCH line",
                "remove the character",
            )
        elif not value.strip(" ,") and not path.startswith("slurm.extra."):
            yield Problem(path, "is empty", "omit the key to use the site's default")
    for name in ("nodelist", "exclude"):
        if "[" in re.sub(r"\[[^][]+\]", "", value := getattr(options, name) or ""):
            message = f"{value!r} has an unclosed bracket, so Slurm would ignore it"
            yield Problem(f"slurm.{name}", message, "for example node[01-02]")
    for number, line in enumerate(options.setup):
        if "\r" in line:
            message = "contains a carriage return"
            yield Problem(f"slurm.setup[{number}]", message, "use Unix line endings")
    if (options.python or "").startswith("-"):
        yield Problem("slurm.python", "starts with a hyphen, so srun would read it as an option")


def _texts(options: Options) -> Iterator[tuple[str, str]]:
    """The text values of the section, each with its path."""
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


def _check_srun(options: Options) -> Iterator[Problem]:
    """Report options that deploykit gives to srun itself; srun takes abbreviations."""
    for number, text in enumerate(options.srun):
        name = text.removeprefix("--").partition("=")[0]
        taken = [option for option in _SRUN_RESERVED if option.startswith(name)]
        if taken:
            message = f"deploykit sets srun's --{name if name in taken else taken[0]} itself"
            yield Problem(f"slurm.srun[{number}]", message, "remove it")
        if name == "auto-resume" and options.container and options.container.runtime == "pyxis":
            message = "HyperPod's srun does not support --auto-resume with Pyxis"
            hint = "set container.runtime: apptainer, or remove the option"
            yield Problem(f"slurm.srun[{number}]", message, hint, severity="warning")


def _check_extra(job: JobSpec, options: Options) -> Iterator[Problem]:
    reserved = dict(_RESERVED)
    if options.gres_style == "gres" and job.resources.gpus_per_node:
        reserved["gres"] = "`resources.gpus_per_node`"
    if options.after:
        reserved["dependency"] = "`slurm.after`"
    for name, value in options.extra.items():
        path = f"slurm.extra.{name}"
        # sbatch accepts abbreviations
        requiring = [option for option in _REQUIRE_VALUE if option.startswith(name)]
        if requiring and not value:
            message = f"sbatch's --{requiring[0]} requires a value"
            yield Problem(path, message, "add a value, or remove the option")
        taken = [option for option in reserved if option.startswith(name)]
        if taken:
            option = name if name in reserved else taken[0]
            instead = reserved[option]
            message = f"sbatch's --{option} cannot be set in slurm.extra"
            hint = "remove it" if instead == _NOT_SUPPORTED else f"use {instead}"
            yield Problem(path, message, hint)


def _check_array(job: JobSpec, options: Options) -> Iterator[Problem]:
    if options.array is None:
        if options.at_once is not None:
            yield Problem("slurm.at_once", "requires slurm.array", "set slurm.array")
        if options.tasks:
            yield Problem("slurm.tasks", "requires slurm.array", "set slurm.array")
        return
    if unknown := [number for number in options.tasks if number >= options.array]:
        message = f"task {unknown[0]} does not exist; the array has tasks 0 to {options.array - 1}"
        yield Problem("slurm.tasks", message)
    if twice := [number for number in options.tasks if options.tasks.count(number) > 1]:
        message = f"lists task {twice[0]} more than once"
        yield Problem("slurm.tasks", message, "list each task once")
    if job.outputs:
        yield Problem(
            "outputs",
            "array tasks share one working folder, so each task would collect every task's files",
            "write to DEPLOYKIT_OUTPUT_DIR, which differs for each task",
            severity="warning",
        )
    if job.resources.min_nodes is not None:
        message = "array tasks must have a fixed number of nodes"
        yield Problem("resources.min_nodes", message, f"set nodes: {job.resources.nodes}")


def _check_container(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Both runtimes read a comma or a colon in a mount as the end of a path."""
    if options.container is None:
        return
    if options.container.image.startswith("-"):
        message = "starts with a hyphen, so the container runtime would read it as an option"
        yield Problem("slurm.container.image", message)
    for number, mount in enumerate(options.container.mounts):
        if "," in mount or mount.count(":") > 1 or not mount.startswith("/"):
            path, hint = f"slurm.container.mounts[{number}]", "/scratch, or /scratch:/data"
            yield Problem(
                path, f"expected FOLDER or FOLDER:INSIDE, got {mount!r}", f"for example {hint}"
            )
    for name, channel in backend.staged(job).items():
        folder = channel.stage_folder or ""
        if channel.stage != "shared" and not folder.startswith("/"):
            message = "an absolute path is required: the folder is mounted into the container"
            yield Problem(f"data.{name}.stage_folder", message, "for example /scratch")
    for path, location in {"": str(options.home), **backend.locations(job)}.items():
        if re.search("[,:]", location) and not is_address(location):
            message = f"{location} contains a comma or a colon, so no container can mount it"
            yield Problem(path, message, "choose another folder")


def _check_environment(
    job: JobSpec, options: Options, installed: dict[str, Any] | None
) -> Iterator[Problem]:
    """Problems that can be found from here. An environment on another host cannot be examined."""
    if installed:
        yield from environments.on_nodes_problems(job, installed)
        return
    if job.environment is None:
        return
    yield from environments.conflict(job, "slurm.python", options.python)
    kind, folder = job.environment.python or ("", "")
    if kind and options.container is not None:
        yield Problem(
            f"environment.{kind}",
            "cannot be used with slurm.container, whose image has its own Python",
            "remove one of them, or set slurm.python to a Python inside the image",
        )
    elif options.host is None:
        prepared = bool(job.environment.modules or options.modules or options.setup)
        yield from environments.problems(job.environment, prepared=prepared)
    elif folder.startswith("/") and Path(folder).is_relative_to(job.source):
        # a relative folder became one of this machine
        yield Problem(
            f"environment.{kind}",
            f"{folder} is on this machine, but the job runs on {options.host}",
            f"use an absolute path on {options.host}, or one that begins with ~/",
        )
