"""The `slurm` section of a job file, and its problems that are found without the cluster."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

from deploykit.backends import base as backend
from deploykit.backends.slurm import client
from deploykit.backends.slurm.sbatch_options import (
    BASH_VARIABLES,
    NOT_SUPPORTED,
    REQUIRE_VALUE,
    RESERVED,
    SAME_KEY,
)
from deploykit.job.decode import NOT_EMPTY, Bounds, Help, Pattern
from deploykit.job.model import JobSpec, Problem
from deploykit.lib import paths, shell
from deploykit.lib.errors import NotFound
from deploykit.lib.paths import is_address

OPTION = Pattern(r"[A-Za-z][A-Za-z0-9-]+", "the long name of an sbatch option, without dashes")
PRICE = Pattern(
    r"[0-9]{1,9}([.][0-9]{1,9})? ?[A-Z]{3}/([gG][pP][uU]|node|[cC][pP][uU]|billing)-hour",
    "a price such as 2.10 USD/gpu-hour; also per node-hour, cpu-hour or billing-hour",
)
RUN = Pattern(r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,62}", "the id of a run")


@dataclass(frozen=True)
class Restarts:
    """How often the job may be restarted, counted separately for each reason."""

    time_limit: Annotated[
        int, Help("After the time limit, if the attempt saved a checkpoint."), Bounds(0, 10_000)
    ] = 100
    preemption: Annotated[int, Help("After a preemption."), Bounds(0, 10_000)] = 100
    node_failure: Annotated[int, Help("After a node failure."), Bounds(0, 10_000)] = 10
    error: Annotated[
        int,
        Help("After a rank failed and torchrun has used up `retries`."),
        Bounds(0, 10_000),
    ] = 0


@dataclass(frozen=True)
class Container:
    """The container in which the launcher and the trainer run."""

    image: Annotated[
        str,
        Help("Image: a file that every node can read, or an address that the runtime accepts."),
        NOT_EMPTY,
    ]
    runtime: Annotated[
        Literal["pyxis", "apptainer"],
        Help("Container runtime: Pyxis with enroot, through options of srun, or Apptainer."),
    ] = "pyxis"
    mounts: Annotated[
        tuple[str, ...],
        Help(
            "More folders to mount, as `FOLDER` or `FOLDER:INSIDE`. The folders of the run and of "
            "the job file are always mounted.",
            "[/scratch]",
        ),
    ] = ()


@dataclass(frozen=True)
class Options:
    """The `slurm` section of a job file."""

    host: Annotated[
        str | None,
        Help(
            "Login node to submit from, as a host name or alias of `ssh`. Default: this machine.",
            example="login1",
        ),
    ] = None
    folder: Annotated[
        str | None,
        Help(
            "With `host`: the folder on it for runs and bundles, which every node can read.",
            example="/shared/ada/deploykit",
        ),
    ] = None
    partition: Annotated[str | None, Help("Partition. Default: the site's.", example="gpu")] = None
    account: Annotated[str | None, Help("Account to charge. Default: yours.")] = None
    qos: Annotated[str | None, Help("Quality of service. Default: the site's.")] = None
    constraint: Annotated[
        str | None, Help("Features that the nodes must have.", example='"a100&nvlink"')
    ] = None
    reservation: Annotated[str | None, Help("Reservation to run in.")] = None
    nodelist: Annotated[str | None, Help("Nodes that must be used.", example="node[01-02]")] = None
    exclude: Annotated[str | None, Help("Nodes that must not be used.", example="node07")] = None
    exclusive: Annotated[bool, Help("Do not share the nodes with other jobs.")] = False
    gres_style: Annotated[
        Literal["gpus-per-node", "gres"],
        Help("How the site expects GPU requests: `--gpus-per-node=N` or `--gres=gpu:N`."),
    ] = "gpus-per-node"
    licenses: Annotated[
        str | None, Help("Licenses that the job needs, as the site names them.", example="matlab:2")
    ] = None
    mail_type: Annotated[
        str | None, Help("Events for which Slurm sends mail.", example='"END,FAIL"')
    ] = None
    mail_user: Annotated[str | None, Help("Recipient of the mail. Default: you.")] = None
    after: Annotated[
        Mapping[Annotated[str, RUN], Literal["succeeded", "failed", "ended"]],
        Help(
            "Runs that must end before this one starts, by run id, and how each must end. If one "
            "ends differently, Slurm cancels this run.",
            example="{prepare-1: succeeded}",
        ),
    ] = field(default_factory=dict)
    array: Annotated[
        int | None,
        Help(
            "Number of tasks of a job array. Each task reads its number, from 0, from "
            "`SLURM_ARRAY_TASK_ID`, and has a folder of that name in output and checkpoints."
        ),
        Bounds(1, 1_000_000),
    ] = None
    at_once: Annotated[
        int | None, Help("Tasks of the array that may run at the same time."), Bounds(1)
    ] = None
    python: Annotated[
        str | None,
        Help(
            "Python on the nodes that runs the trainer; `~/` is your home there. Default: that of "
            "the environment that `setup` or `modules` activate, else the one that runs "
            "deploykit, or `python3` with `host` or in a container. See also `environment`.",
            example="/shared/venv/bin/python",
        ),
    ] = None
    modules: Annotated[
        tuple[str, ...], Help("Environment modules to load first.", "[cuda/12.8]")
    ] = ()
    setup: Annotated[
        tuple[str, ...],
        Help(
            "Shell lines that the batch script runs before srun. One that fails ends the job.",
            "[ulimit -c 0]",
        ),
    ] = ()
    container: Annotated[Container | None, Help("Container to run in. Default: none.")] = None
    signal_seconds: Annotated[
        int | None,
        Help(
            "Seconds before the time limit at which the job gets SIGUSR2. Slurm may send it up to "
            "60 s early. Default: 90, or half of a short time limit."
        ),
        Bounds(1, 65535, "s"),
    ] = None
    restarts: Annotated[
        Restarts, Help("How often the job may be restarted, by reason. All 0: never.")
    ] = field(default_factory=Restarts)
    site: Annotated[
        str | None,
        Help(
            "Site profile to check against: a cluster's name or a file. "
            "`deploykit backends slurm --probe` writes one on the cluster.",
            example="prod",
        ),
        NOT_EMPTY,
    ] = None
    price: Annotated[
        str | None,
        Help(
            "What the site charges, for `deploykit cost` and `max_cost`. With `billing-hour`, the "
            "partition's TRESBillingWeights in the site profile count. Default: nothing.",
            example="2.10 USD/gpu-hour",
        ),
        PRICE,
    ] = None
    extra: Annotated[
        Mapping[Annotated[str, OPTION], str],
        Help(
            "Other options of sbatch, by their long names; use an empty value for a flag.",
            example='{nice: "100", contiguous: ""}',
        ),
    ] = field(default_factory=dict)

    def run_folder(self, run: str) -> Path:
        """The path of a run's folder on the nodes."""
        return self.home / "runs" / run

    @property
    def home(self) -> Path:
        """The path of deploykit's folder on the nodes: `folder` with a host, else `paths.state`."""
        return Path(self.folder) if self.host and self.folder else paths.state()


_SHOW_STATE_FOLDER = "echo ~/.local/state/deploykit"
_MIN_MEMORY = 1024**2
_REPLACED = re.compile(r"[%\\]")
"""Characters that Slurm replaces in a path."""


def bills(options: Options) -> bool:
    """Whether the site has a price."""
    return options.price is not None


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Yield every problem that can be found without the cluster; reads a site profile if named."""
    yield from _check_home(options)
    yield from _check_locations(job, options)
    yield from _check_python(job, options)
    yield from backend.check_ranks(job)
    yield from _check_values(options)
    yield from _check_extra(job, options)
    yield from _check_dependencies(options)
    yield from _check_container(job, options)
    if job.environment is not None or job.outputs:
        from deploykit.backends.slurm import job_checks  # a dry run without them need not wait

        yield from job_checks.problems(job, options)
    yield from _check_numbers(job, options)
    for name in sorted(BASH_VARIABLES.intersection(job.env)):
        yield Problem(f"env.{name}", "bash sets this variable itself", "choose another name")
    if options.site is not None:
        yield from _check_site(job, options, options.site)


def _check_home(options: Options) -> Iterator[Problem]:
    home, name = str(options.home), "slurm.folder" if options.host else "DEPLOYKIT_HOME"
    if _has_control_character(home) or _REPLACED.search(home):
        yield Problem(
            "slurm.folder" if options.host else "",
            f"deploykit's folder {home!r} contains a control character, % or \\, which Slurm does "
            "not accept in a path",
            f"set {name} to a folder with a plain name on a file system shared with the nodes",
        )
    if options.host is None:
        if options.folder is not None:
            hint = "set slurm.host, or use DEPLOYKIT_HOME"
            yield Problem("slurm.folder", "requires slurm.host", hint)
        return
    if options.host.startswith("-"):
        yield Problem("slurm.host", "starts with a hyphen, like an option of ssh")
    if options.folder is None or not options.folder.startswith("/"):
        yield Problem(
            "slurm.folder",
            f"an absolute path on {options.host} is required, for runs and bundles",
            "for example the output of "
            f"`{shell.command('ssh', '--', options.host, _SHOW_STATE_FOLDER)}`",
        )


def _check_locations(job: JobSpec, options: Options) -> Iterator[Problem]:
    for path, location in backend.addresses(job).items():
        yield Problem(
            path,
            f"a Slurm node cannot use {location} as a folder",
            f"copy it to a shared folder, and set that folder with --set {path}=FOLDER",
        )
    if options.host is None:
        for missing in backend.missing_data(job):
            yield Problem(*missing, severity="warning")
        return
    for path, location in backend.locations(job).items():
        if Path(location).is_relative_to(job.source):
            message = f"{location} is in the source folder of this machine"
            yield Problem(path, message, f"the path on {options.host}", severity="warning")


def _check_python(job: JobSpec, options: Options) -> Iterator[Problem]:
    """The Python of the job: on this machine, if it is the one that the nodes would use too."""
    here = options.host is None and options.container is None
    if options.python is not None and not options.python.startswith(("/", "~", "-")):
        if "/" in options.python:
            message = f"{options.python} is relative, and the job starts in a copy of the source"
            yield Problem("slurm.python", message, "an absolute path on the nodes")
    elif here and options.python and not os.path.exists(paths.expanded(options.python)):  # noqa: PTH110 - too long
        message = f"{options.python} was not found on this machine; the nodes must have it"
        yield Problem("slurm.python", message, severity="warning")
    python = None if options.python or options.setup or options.modules else sys.executable
    if job.environment is not None:
        from deploykit.job import environments  # few jobs name one

        python = environments.python(job.environment)
    yield from backend.check_program(job, Path(python) if here and python else None)


def _check_values(options: Options) -> Iterator[Problem]:
    """Values that are empty, or that would break out of their #SBATCH line."""
    for path, value in _texts(options):
        if _has_control_character(value):
            yield Problem(
                path,
                f"{value!r} contains a line break or another control character, and would break "
                "out of its #SBATCH line",
                "remove it",
            )
        elif not value.strip(" ,") and not path.startswith("slurm.extra."):
            yield Problem(path, "is empty", "omit the key to use the site's default")
    for number, line in enumerate(options.setup):
        if "\r" in line:
            path = f"slurm.setup[{number}]"
            yield Problem(path, "contains a carriage return", "use Unix line endings")
    if (options.python or "").startswith("-"):
        yield Problem("slurm.python", "starts with a hyphen, like an option of srun")


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


def _check_extra(job: JobSpec, options: Options) -> Iterator[Problem]:
    reserved = RESERVED | {name: f"`slurm.{name}`" for name in SAME_KEY}
    if options.gres_style == "gres" and job.resources.gpus_per_node:
        reserved["gres"] = "`resources.gpus_per_node`"
    if options.after:
        reserved["dependency"] = "`slurm.after`"
    for name, value in options.extra.items():
        path = f"slurm.extra.{name}"
        if not value and (option := _option(name, REQUIRE_VALUE)):
            message = f"sbatch's --{option} requires a value"
            yield Problem(path, message, "add a value, or remove the option")
        option = name if name in reserved else _option(name, reserved)
        if option is not None:
            instead = reserved[option]
            message = f"sbatch's --{option} cannot be set in slurm.extra"
            hint = "remove it" if instead == NOT_SUPPORTED else f"use {instead}"
            yield Problem(path, message, hint)


def _option(prefix: str, options: Iterable[str]) -> str | None:
    """The first option that starts with `prefix`, as sbatch accepts abbreviations."""
    return next((option for option in options if option.startswith(prefix)), None)


def _check_dependencies(options: Options) -> Iterator[Problem]:
    for run in options.after:
        if client.job_id(paths.run_folder(run)) is None:
            yield Problem(
                f"slurm.after.{run}",
                "no run with this id was submitted to Slurm from this machine",
                "`deploykit list` shows the runs",
            )
    if options.array is None and options.at_once is not None:
        yield Problem("slurm.at_once", "requires slurm.array", "set slurm.array")


def _check_container(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Both runtimes read a comma or a colon in a mount as the end of a path."""
    if options.container is None:
        return
    if options.container.image.startswith("-"):
        yield Problem("slurm.container.image", "starts with a hyphen, like an option")
    for number, mount in enumerate(options.container.mounts):
        if "," in mount or mount.count(":") > 1 or not mount.startswith("/"):
            path, hint = f"slurm.container.mounts[{number}]", "/scratch, or /scratch:/data"
            yield Problem(path, f"{mount!r} is not FOLDER or FOLDER:INSIDE", f"for example {hint}")
    for path, location in {"": str(options.home), **backend.locations(job)}.items():
        if re.search("[,:]", location) and not is_address(location):
            message = f"{location} cannot be mounted in a container: it contains a comma or a colon"
            yield Problem(path, message, "choose another folder")


def _check_numbers(job: JobSpec, options: Options) -> Iterator[Problem]:
    limit, notice = job.resources.time_limit, options.signal_seconds
    if notice is not None and notice >= limit:
        message = f"{notice} s is not less than the time limit of {limit} s"
        hint = "lower it, or raise resources.time_limit"
        yield Problem("slurm.signal_seconds", message, hint)
    memory = job.resources.memory
    if memory is not None and memory < _MIN_MEMORY:
        yield Problem("resources.memory", "must be at least 1MiB on Slurm")


def _check_site(job: JobSpec, options: Options, name: str) -> Iterator[Problem]:
    from deploykit.backends.slurm import site, site_checks  # few jobs name a site profile

    try:
        yield from site_checks.problems(job, options, site.load(name))
    except NotFound as error:
        yield Problem("slurm.site", str(error), error.hint)


def _has_control_character(text: str) -> bool:
    return re.search(r"[\x00-\x1f\x7f-\x9f]", text) is not None
