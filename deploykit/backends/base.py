"""The contract of a backend: what it offers to commands, and what its plans tell the nodes.

A backend is a module that meets `Backend`, and may define functions of `Capabilities` beyond it.
Commands ask for a backend by name; no command knows which backends there are.

What a plan tells the nodes is the same on every backend: a file to start, its arguments, and
variables. The other side is ``entrypoints/deploykit_node``; the reference is
``docs/reference/node.md``.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, cast

from deploykit.bundle.node_plane import FOLDER
from deploykit.job.checks import check_launch, check_module, is_secret, near_folder
from deploykit.job.decode import as_data
from deploykit.job.model import (
    Bundle,
    Handle,
    InputChannel,
    JobSpec,
    LogLine,
    Plan,
    Problem,
    Status,
)
from deploykit.job.spelling import did_you_mean
from deploykit.lib import paths
from deploykit.lib.errors import DeploykitError, UsageError

if TYPE_CHECKING:
    from deploykit.backends.deployment import (
        Billed,
        Condition,
        Deployment,
        DeploymentPlan,
        Package,
        RegistrationPlan,
        Scale,
        ScalePlan,
    )
    from deploykit.cost.estimate import Estimate
    from deploykit.lib.finding import Finding
    from deploykit.observe.metrics.points import Point
    from deploykit.observe.trackers.contract import ModelVersion, Registration

DEFAULT = "local"
"""The backend of a job file that has a section for none."""

LAUNCH = f"{FOLDER}/launch.py"
"""The launcher, in the source of a run."""

FOLDERS = ("logs", "output", "checkpoints", "exit_records")
"""Subfolders of a run folder."""

PRICE = "price.json"
"""In a run folder: what an hour of the job costs, where something is billed."""

JOB = "job.json"
"""In a run folder: the job with all overrides and arguments, as a job file for `rerun`."""

LOG_LIMIT = 1 << 30
"""Bytes of a node's log unless the job file says otherwise; the same in the node's relay."""

PREFLIGHT = 30
"""Seconds that the network test before the trainer may take."""

_BUILT_IN = ("local", "slurm", "sagemaker")
"""Modules of `deploykit.backends`."""
_GROUP = "deploykit.backends"


class Serving(NamedTuple):
    """How a package is served over HTTP."""

    host: str
    port: int
    replicas: int
    """Processes, each with the model."""
    device: str | None
    max_body: int
    """Bytes of a request."""
    concurrency: int
    """Requests underway at once, above which others are refused."""
    timeout: float
    """Seconds for a body to arrive, for a replica to become idle, and for the answer."""
    max_batch_size: int
    """Requests that a replica answers together; 1: each alone."""
    batch_timeout: float
    """Seconds that a request waits for others."""
    python: str


class Backend(Protocol):
    """Seven functions and four facts. `deploykit/backends/local.py` is the one to read first."""

    @property
    def SUMMARY(self) -> str:
        """One line for ``deploykit backends``."""

    @property
    def PROGRAMS(self) -> tuple[str, ...]:
        """Programs that must be on PATH to submit (never to plan)."""

    @property
    def MODULES(self) -> tuple[str, ...]:
        """Python modules that must be importable to submit (never to plan)."""

    @property
    def Options(self) -> type[Any]:
        """Frozen dataclass of the backend's section in the job file."""

    def check(self, job: JobSpec, options: Any) -> Iterator[Problem]:
        """Yield every problem that can be found offline. Pure."""

    def plan(self, job: JobSpec, options: Any, *, run: str, bundle: Bundle) -> Plan:
        """Render the text of the plan of a job without errors. Pure: no network, no writes.

        Raises JobFileError for what shows only in the rendered text.
        """

    def submit(self, plan: Plan, folder: Path) -> Handle:
        """Send exactly `plan.text`, with its bundle.

        `folder` is the run's; it exists and holds the text as ``plan.sh`` or ``plan.json``.

        Raises SubmitRefused, BackendUnavailable or TryAgain when nothing was started, and
        Uncertain when the job may exist.
        """

    def find(self, run: str, folder: Path, target: str) -> Handle | None:
        """The job of that run id at the target; None where there is certainly none.

        `target` is the plan's. Raises BackendUnavailable when it cannot tell.
        """

    def status(self, handles: Sequence[Handle]) -> Mapping[Handle, Status]:
        """The status of many runs, with one query to each target if the target allows it."""

    def logs(self, handle: Handle, *, follow: bool) -> Iterator[LogLine]:
        """Lines of all ranks, oldest first; with `follow`, until the job has ended."""

    def cancel(self, handle: Handle) -> None:
        """Request that the job stop; return once the target has accepted the request."""


class Profile(NamedTuple):
    """Resources and limits of a target, as recorded by `probe`."""

    path: Path
    """The file that keeps it."""
    facts: Mapping[str, Any]
    """The profile as plain data."""
    summary: tuple[str, ...]
    """The profile as lines of text."""


class Start(NamedTuple):
    """Where a job could run, and when it would start there."""

    where: str
    """``partition gpu``, ``ml.g5.xlarge in us-east-1``, ``this machine``."""
    options: Any
    """The backend's section with which it runs there."""
    at: datetime | None
    """When the target expects it to start; None if the target gives no time."""
    reason: str = ""
    """Why it cannot start there, or what else is known."""
    possible: bool = True
    settings: Mapping[str, str] = {}
    """Keys of the job file that choose it, such as ``slurm.partition``; empty if already chosen."""


class SettingRule(NamedTuple):
    """A rule by which `check` judges a setting. Names of values of a job are in braces."""

    id: str
    path: str
    """The key of the job file."""
    verdict: str
    """``refused``, ``runs differently``."""
    reason: str
    suggestion: str | None
    """The nearest setting that works."""
    source: str


class RemoteFile(NamedTuple):
    """A file of a run that is not on this machine."""

    name: str
    """Its path below the folder or prefix that was listed."""
    size: int
    """Bytes."""
    modified: float
    """Seconds since 1970."""
    address: str
    """Its location, such as ``s3://bucket/key`` or ``host:/path``."""
    etag: str = ""
    """The ETag that S3 gives its content."""


class Capabilities(Backend, Protocol):
    """Optional functions of a backend, beyond the contract.

    A backend offers a capability by defining its function; `offers` and `require` look for it.
    Functions that stand together under one heading are defined together.
    """

    # ------------------------------------------------------------ before a job is sent

    @property
    def UNLIMITED(self) -> bool:
        """True: jobs need no time limit."""

    @property
    def PREFLIGHT(self) -> int:
        """Nodes run deploykit's launcher: seconds that its network test may take."""

    def missing(self, absent: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Missing prerequisites of a submit from this machine, and how to get each.

        `absent` are the programs and modules that were not found. Queries the target if that takes
        a few seconds at most, and changes nothing there.
        """

    def setting_rules(self) -> Iterator[SettingRule]:
        """The rules by which `check` judges settings, for `deploykit explain`. Pure."""

    def examine(
        self, job: JobSpec, options: Any, *, saved: Path | None, save: Path | None
    ) -> Iterator[Finding]:
        """Findings about the target, for a job that has passed `check`. Changes nothing there.

        `saved` is a folder of facts to judge instead of querying the target; `save` is a folder to
        write the facts to. Raises NotFound if `saved` has no valid facts.
        """

    def probe(self, target: str | None) -> Profile:
        """Query the target, by default the one of the environment, and store its profile."""

    def submitter_policy(self, job: JobSpec, options: Any) -> Mapping[str, Any]:
        """The smallest policy that lets a person submit this job, as JSON. Pure."""

    def node_names(self, options: Any) -> Collection[str]:
        """The names of all nodes of the target, which `Options.exclude` accepts. Queries it.

        Raises BackendUnavailable.
        """

    def slots(self, job: JobSpec, options: Any) -> Sequence[Mapping[str, str]]:
        """Variables that separate jobs running at the same time, one mapping for each job.

        Empty if there is no limit. Queries this machine only.
        """

    def check_function(self, options: Any) -> Iterator[Problem]:
        """Yield the problems of settings that keep a function's result from coming back. Pure.

        Offered if nodes see the run folder, where `deploykit.launch` keeps its results.
        """

    # ------------------------------------------------------------ folders of `data` that are sent

    def unsent_data(self, plan: Plan) -> int:
        """Bytes of `plan.data` that the target does not have. Queries it.

        Raises BackendUnavailable, NotPermitted, TryAgain or SubmitRefused.
        """

    def storage_price(self, size: int) -> str:
        """Describe the cost of keeping `size` bytes of data, in a few words. Offline."""

    # ------------------------------------------------------------ cost and time

    def bills(self, options: Any) -> bool:
        """Whether anything is billed. Imports nothing: every dry run calls it."""

    def cost(self, job: JobSpec, options: Any) -> Estimate:
        """What a job that has passed `check` may cost. Pure: reads at most files with prices."""

    def refresh_prices(self, job: JobSpec, options: Any) -> str:
        """Fetch and store the prices of the job's region. Returns a line for people.

        Raises BackendUnavailable, NotPermitted or TryAgain.
        """

    def alternatives(self, job: JobSpec, options: Any) -> Mapping[str, Estimate]:
        """What the job may cost bought in other ways, by their names, such as ``spot``."""

    def when(self, plan: Plan) -> Iterator[Start]:
        """Where the job could run. Queries the target, and submits nothing.

        Raises BackendUnavailable, NotPermitted or TryAgain.
        """

    # ------------------------------------------------------------ several jobs as one array

    def largest_array(self, options: Any) -> int:
        """The most runs in one array; 0: none with these options. Queries the target.

        Raises BackendUnavailable.
        """

    def submit_array(
        self, plans: Sequence[Plan], folder: Path, name: str, at_once: int
    ) -> Sequence[Handle]:
        """Send exactly these plans, which differ in their arguments only, as one array.

        `folder` is new and the array's own; the folder of each run holds its text. At most
        `at_once` run at the same time. The run ids begin with `name` and a hyphen. Later `find`
        finds each run by its folder. Raises as `Backend.submit`.
        """

    def cancel_all(self, handles: Sequence[Handle]) -> None:
        """As `Backend.cancel` for many runs, with few commands."""

    # ------------------------------------------------------------ a job that was sent

    def attach(self, run: str, folder: Path, target: str | None) -> Handle:
        """Find a job by its run id alone; `target` None means the default of the environment.

        `folder` is the run's on this machine, which may not exist yet. Raises NotFound if there
        is no such job, UsageError if no target is known.
        """

    def tasks(self, handle: Handle) -> Sequence[int] | None:
        """The numbers of the tasks of a run, ascending; None if it is not an array."""

    def task_status(self, handle: Handle) -> Mapping[int, Status]:
        """The status of each task of a job array by its number; empty where the run is not one."""

    def choose_tasks(self, numbers: Sequence[int]) -> Mapping[str, str]:
        """Keys of the backend's section with which only these tasks of an array run. Pure."""

    def await_end(self, handles: Sequence[Handle], timeout: float) -> None:
        """Return once a running job seems to have ended, after `timeout` seconds at the latest.

        May return too early. Cheaper than calling `status` again and again.
        """

    def metrics(self, handle: Handle) -> Iterator[Point]:
        """The last value of each metric that the service extracted from the log. Queries it."""

    def pages(self, handle: Handle) -> Mapping[str, str]:
        """Addresses of the job in the target's console, by name: ``console``, ``logs``. Pure."""

    def logs_elsewhere(self, handle: Handle) -> bool:
        """Whether the logs in the run folder are a copy that `logs` brings up to date."""

    def dump(self, handle: Handle, folder: Path, *, native: bool) -> Sequence[str]:
        """Have each node write the stacks of its ranks into `folder`, a file for each node.

        `folder` is one of ``stacks/`` in the run folder, and does not exist yet. `native` adds
        calls of C and C++. Returns what went wrong, as sentences; the program is not disturbed.
        Raises TryAgain if no rank is running, BackendUnavailable if no node can be reached.
        """

    def dump_by_hand(self, handle: Handle) -> tuple[str, str]:
        """Why `dump` is impossible, and what a person can do instead. Offline."""

    def enter(
        self, handle: Handle, rank: int, command: Sequence[str], *, terminal: bool
    ) -> Sequence[str]:
        """The command line of this machine that runs `command` on the rank's node.

        It runs in the rank's working folder with its environment; without `command` it is a shell.
        `terminal` means that a person types and reads. Starts nothing. Raises TryAgain if the
        rank is not running, UsageError if the job or the backend does not allow it.
        """

    def files(self, handle: Handle, part: str) -> Sequence[RemoteFile] | None:
        """The files of the run's ``output`` or ``checkpoints``, by name; queries the target.

        None if that part is on this machine. Raises BackendUnavailable, NotPermitted or TryAgain.
        """

    def download(
        self,
        handle: Handle,
        files: Sequence[RemoteFile],
        folder: Path,
        done: Callable[[int], None],
    ) -> None:
        """Copy some of `files` into `folder`, under their names; folders of names exist.

        A file appears under its name once it is complete. Calls `done` with bytes as they arrive.
        Raises as `files`.
        """

    def serve(self, package: Path, serving: Serving) -> Sequence[str]:
        """The command line that serves a package until it receives SIGTERM. Starts nothing."""

    # ------------------------------------------------------------ endpoints and batch jobs

    def check_deployment(self, options: Any, package: Package | None = None) -> Iterator[Problem]:
        """Yield every problem of serving a package that can be found offline. Pure."""

    def plan_deployment(
        self,
        options: Any,
        package: Package,
        *,
        name: str,
        exists: bool = False,
        earlier: Deployment | None = None,
    ) -> DeploymentPlan:
        """Render the requests that serve a package under `name`. Pure.

        `exists` says that there is an endpoint of this name, and `earlier` what it serves, if
        known. `check_deployment` must have found no errors.
        """

    def may_deploy(self, plan: DeploymentPlan, own: Collection[str] | None) -> None:
        """Raise unless the plan's endpoint is free, or serves a configuration of `own`.

        None: it may serve anything. SubmitRefused if it belongs to something else, TryAgain while
        it changes.
        """

    def deploy(self, plan: DeploymentPlan, archive: Path, own: Collection[str] | None) -> None:
        """Upload the archive, and send the requests of a plan that are not `later`.

        What exists already stays as it is, so this can be repeated. `own` is as for `may_deploy`.
        """

    def deploy_later(self, deployment: Deployment) -> None:
        """Send the requests that are `later`; the endpoint is in service."""

    def conditions(self, deployments: Sequence[Deployment]) -> Sequence[Condition]:
        """The condition of the endpoint or batch job of each deployment. Queries the target."""

    def endpoint_logs(self, deployment: Deployment, *, follow: bool) -> Iterator[LogLine]:
        """Lines of all instances, oldest first; with `follow`, also those that come."""

    def invoke(  # noqa: PLR0913 - the parts of a request
        self,
        deployment: Deployment,
        body: bytes,
        *,
        content_type: str,
        accept: str,
        variant: str = "",
        timeout: float | None = None,
    ) -> tuple[bytes, str]:
        """The answer to one request, and its type.

        `timeout` is how long to wait for an asynchronous answer; None: its address is returned.
        """

    def plan_scale(self, deployment: Deployment, wanted: Scale, seconds: int | None) -> ScalePlan:
        """The machines after a change, and their cost in `seconds`, by default in a month. Offline.

        Raises UsageError if the endpoint cannot be changed so.
        """

    def scale(self, deployment: Deployment, wanted: Scale) -> None:
        """Change instances, limits of autoscaling or weights of the endpoint as it is.

        `plan_scale` must have accepted the change.
        """

    def switch(self, earlier: Deployment, current: Deployment) -> None:
        """Let the endpoint serve an earlier deployment again."""

    def remove_deployment(self, deployments: Sequence[Deployment]) -> None:
        """Delete an endpoint, with the configurations and models of all its deployments.

        Ignores what is already gone. Stops a batch job, since it cannot be deleted.
        """

    def billed_endpoints(
        self, deployments: Sequence[Deployment]
    ) -> tuple[list[Billed], list[DeploykitError]]:
        """All endpoints of deploykit, also of other machines, and their costs. Queries the target.

        It is asked where these deployments are, and where the environment says. Also returns an
        error, which names it, for each location that could not be asked.
        """

    # ------------------------------------------------------------ a registry of models

    def plan_registration(
        self, options: Any, package: Package, model: Registration
    ) -> RegistrationPlan:
        """Render the requests that register a package. Pure.

        Raises JobFileError if the options do not say how the package could be served.
        """

    def register(self, plan: RegistrationPlan, archive: Path) -> ModelVersion:
        """Send the requests for what does not exist, and the archive of the package first.

        A version that has the package already only gets the approval.
        """

    def transfer_price(self, size: int) -> str:
        """Describe the cost of downloading `size` bytes in one sentence. Offline."""

    def remains(self, handle: Handle, output: str) -> Iterator[tuple[str, str]]:
        """Each location outside the run folder where a run left files, with a removal command.

        `output` is the location of its results. The run may never have been sent. Offline.
        """

    def remove_remains(self, handle: Handle, output: str) -> None:
        """Delete what `remains` lists. Raises as `files`."""


REQUESTED = {
    "examine": "doctor",
    "attach": "attach",
    "probe": "probe",
    "tasks": "tasks",
    "PREFLIGHT": "preflight",
    "check_function": "launch",
    "cost": "cost",
    "when": "when",
    "dump": "dump",
    "enter": "shell",
    "files": "fetch",
    "serve": "deploy",
    "plan_deployment": "endpoint",
    "plan_registration": "register",
}
"""Capabilities that users know, with the names that ``deploykit backends`` lists."""


def offers(engine: Backend, name: str) -> TypeGuard[Capabilities]:
    """Return whether a backend defines the member `name` of `Capabilities`."""
    if not hasattr(Capabilities, name):
        raise AttributeError(f"Capabilities has no member {name!r}")
    return hasattr(engine, name)


def require(name: str, capability: str, *others: str) -> Capabilities:
    """Return the backend `name`, which must define the member `capability`, or one of `others`.

    Raises UsageError if it does not, with the backends that do.
    """
    engine, members = find(name), (capability, *others)
    if any(offers(engine, member) for member in members):
        return cast(Capabilities, engine)
    offering = (
        other for other in names() if any(offers(find(other), member) for member in members)
    )
    raise UsageError(
        f"backend {name} does not offer `{REQUESTED.get(capability, capability)}`",
        hint=f"backends that offer it: {', '.join(offering) or 'none'}",
    )


def names() -> Iterator[str]:
    """Names of all backends: built in, then installed ones, which take 25 ms to look for."""
    yield from _BUILT_IN
    yield from (point.name for point in _installed() if point.name not in _BUILT_IN)


def find(name: str) -> Backend:
    """Import the backend `name`. Raises UsageError, with the nearest name, when there is none."""
    if name in _BUILT_IN:
        return cast(Backend, importlib.import_module(f"deploykit.backends.{name}"))
    for point in _installed():
        if point.name == name:
            try:
                return cast(Backend, point.load())
            except Exception as error:
                raise UsageError(
                    f"backend {name} cannot be imported: {type(error).__name__}: {error}",
                    hint=f"repair or uninstall the package that contains {point.value}",
                ) from error
    known = list(names())
    raise UsageError(
        f"unknown backend {name!r}",
        hint=did_you_mean(name, known) or f"available backends: {', '.join(known)}",
    )


def environment(  # noqa: PLR0913 - one keyword for each location of the contract
    job: JobSpec,
    *,
    backend: str,
    run: str,
    output: str,
    checkpoints: str,
    data: Mapping[str, str],
    folder: str | None = None,
) -> dict[str, str]:
    """The variables that a plan sets on each node, sorted by name.

    `output`, `checkpoints` and `data` are folders as the node sees them. `folder` is the run's,
    where the nodes can see it: there the launcher writes its exit record. Secrets are not resolved:
    ``DEPLOYKIT_SECRETS`` carries the references, and the node looks them up.
    """
    plain = {name: value for name, value in job.env.items() if not is_secret(value)}
    secret = {name: value for name, value in sorted(job.env.items()) if is_secret(value)}
    optional = {
        "DEPLOYKIT_SECRETS": json.dumps(secret) if secret else None,
        "DEPLOYKIT_STAGE": json.dumps(as_data(staged(job))) if staged(job) else None,
        "DEPLOYKIT_RUN_DIR": folder,
        "DEPLOYKIT_OUTPUTS": json.dumps(job.outputs) if job.outputs else None,
        "DEPLOYKIT_ON_STALL": job.on_stall if job.on_stall != "dump" else None,
        "DEPLOYKIT_RESTART_POLICY": json.dumps(vars(job.restarts)) if job.restarts else None,
        "DEPLOYKIT_LOG_LIMIT": str(job.log_limit) if job.log_limit != LOG_LIMIT else None,
        "DEPLOYKIT_PROFILE": job.profile or None,
        "DEPLOYKIT_DEBUG": "1" if job.debug else None,
        "DEPLOYKIT_PREFLIGHT": str(PREFLIGHT) if job.preflight else None,
    }
    variables = {
        **plain,
        "DEPLOYKIT_BACKEND": backend,
        "DEPLOYKIT_CHECKPOINT_DIR": checkpoints,
        "DEPLOYKIT_OUTPUT_DIR": output,
        "DEPLOYKIT_RUN": run,
        **{f"DEPLOYKIT_DATA_{name.upper()}": location for name, location in data.items()},
        **{name: value for name, value in optional.items() if value is not None},
    }
    return dict(sorted(variables.items()))


def in_folder(job: JobSpec, backend: str, run: str, folder: Path) -> dict[str, str]:
    """`environment` for a backend whose nodes see the run's folder.

    With a bucket for checkpoints, the nodes copy those of the run's folder there.
    """
    bucket, own = checkpoint_bucket(job), str(folder / "checkpoints")
    variables = environment(
        job,
        backend=backend,
        run=run,
        output=job.output or str(folder / "output"),
        checkpoints=own if bucket else job.checkpoints or own,
        data={name: channel.path for name, channel in job.data.items() if not channel.stage},
        folder=str(folder),
    )
    if bucket:
        variables["DEPLOYKIT_CHECKPOINT_BUCKET"] = bucket
    if job.keep_checkpoints:
        variables["DEPLOYKIT_KEEP_CHECKPOINTS"] = str(job.keep_checkpoints)
    if job.notify:
        web = [one for one in job.notify.to if one.startswith(("http", "secret:"))]
        if web or job.notify.command:
            settings = {**as_data(job.notify), "to": web}
            variables["DEPLOYKIT_NOTIFY"] = json.dumps(settings)
    return dict(sorted(variables.items()))


def checkpoint_bucket(job: JobSpec) -> str | None:
    """The prefix in S3 of the job's checkpoints, if that is where they are."""
    location = job.checkpoints or ""
    return location if location.startswith("s3://") else None


def staged(job: JobSpec) -> dict[str, InputChannel]:
    """The channels that the nodes copy before the ranks start: ``deploykit_node/staging.py``."""
    return {name: channel for name, channel in job.data.items() if channel.stage}


def staging_comments(job: JobSpec) -> list[str]:
    """For the plan's script: what is copied from where to which folder, a comment for each."""
    local = "the first writable folder among $SLURM_TMPDIR, /scratch, $TMPDIR and /tmp"
    lines = []
    for name, channel in staged(job).items():
        action, default = {
            "node": ("each node copies", local),
            "shard": ("each node copies its share of", local),
            "shared": ("node 0 copies", "data/ in the run's folder"),
        }[channel.stage or ""]
        source = json.dumps(channel.path, ensure_ascii=False)  # a line break would end the comment
        folder = channel.stage_folder or default
        lines.append(f"# {name}: {action} {source} to {folder} before the ranks start")
    return lines


def locations(job: JobSpec) -> dict[str, str]:
    """The locations that a job file names, by their path in it."""
    data = {f"data.{name}": channel.path for name, channel in job.data.items()}
    others = {"output": job.output, "checkpoints": job.checkpoints}
    return data | {path: location for path, location in others.items() if location is not None}


def addresses(job: JobSpec) -> dict[str, str]:
    """The `locations` that are addresses."""
    return {
        path: location for path, location in locations(job).items() if paths.is_address(location)
    }


def check_addresses(job: JobSpec, unusable: str, instead: str) -> Iterator[Problem]:
    """Problems of addresses on a backend whose nodes read folders, and of `stage`.

    `unusable` is the message, with ``{location}``; `instead` the hint, with ``{path}``.
    """
    channels = staged(job)
    for path, location in addresses(job).items():
        name = path.removeprefix("data.") if path.startswith("data.") else None
        message, hint = unusable.format(location=location), instead.format(path=path)
        in_s3 = location.startswith("s3://")
        if (name in channels or path == "checkpoints") and in_s3:
            continue
        if name in channels:
            message = f"{location} cannot be copied to the nodes"
            hint = "use a folder or an s3:// prefix"
        elif name in job.data and in_s3:
            hint = f"to copy it to the nodes, set {name}: {{path: {location}, stage: node}}"
        yield Problem(path, message, hint)
    for name, channel in job.data.items():
        if channel.stage_folder is not None and channel.stage is None:
            yield Problem(f"data.{name}.stage_folder", "requires `stage`", "add stage: node")
        if channel.stage in {"shard", "shared"} and job.resources.min_nodes is not None:
            message = f"`{channel.stage}` requires a fixed number of nodes"
            yield Problem(f"data.{name}.stage", message, "use stage: node")


def command(job: JobSpec, environment: Mapping[str, Any] | None = None) -> list[str]:
    """The arguments of ``launch.py``: torchrun's options, ``--``, the program and its arguments.

    `environment` comes first: what each node installs before that (`environments.on_nodes`). The
    launcher adds what only the node knows: address, port, node rank.
    """
    before = ["environment", json.dumps(environment)] if environment else []
    if job.entrypoint.launcher == "python":
        return [*before, "python", f"--nnodes={job.resources.nodes}", "--", *program(job)]
    return [
        *before,
        "torchrun",
        f"--nnodes={job.resources.node_range}",
        f"--nproc-per-node={job.resources.processes}",
        f"--max-restarts={job.retries}",
        "--",
        *program(job),
    ]


def program(job: JobSpec) -> list[str]:
    """The user's program and its exact arguments: ``train.py a b`` or ``-m package a b``."""
    entry = job.entrypoint
    if entry.module is not None:
        return ["-m", entry.module, *entry.args]
    return [entry.script or "", *entry.args]


def check_checkpoint_bucket(job: JobSpec) -> Iterator[Problem]:
    """Problems of a bucket for checkpoints where the launcher of each node copies them."""
    location = checkpoint_bucket(job)
    if location is None:
        return
    if not location.removeprefix("s3://").partition("/")[0]:
        yield Problem("checkpoints", f"{location} has no bucket name", "use s3://BUCKET/PREFIX")
    if job.resources.min_nodes is not None:
        message = "cannot be in a bucket if the number of nodes can change"
        hint = f"use a folder that all nodes share, or set nodes: {job.resources.nodes}"
        yield Problem("checkpoints", message, hint)


def check_ranks(job: JobSpec) -> Iterator[Problem]:
    """Problems of `retries` and of several ranks on one GPU, which NCCL refuses, and of a profile.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
    """
    ranks, gpus = job.resources.processes, job.resources.gpus_per_node
    if job.retries and job.entrypoint.launcher == "python":
        message = "requires torchrun, but `launcher: python` starts the script without it"
        hint = "remove it; on Slurm, use slurm.restarts.error to restart the job"
        yield Problem("retries", message, hint)
    if 0 < gpus < ranks:
        message = f"{ranks} ranks per node would share {gpus} GPU(s), which NCCL does not support"
        path = "resources.processes_per_node"
        yield Problem(path, message, f"set processes_per_node: {gpus}", severity="warning")
    if (job.profile or "").startswith("nsys:") and not gpus:
        message = "nsys can profile selected steps only with CUDA, but the job requests no GPU"
        hint = "use nsys without steps to profile the whole run"
        yield Problem("profile", message, hint, severity="warning")


def missing_data(job: JobSpec) -> Iterator[Problem]:
    """Yield a problem for each folder of `data` that does not exist on this machine."""
    for name, channel in job.data.items():
        location = channel.path
        if not paths.is_address(location) and not os.path.exists(location):  # noqa: PTH110 - too long
            message = f"{location} was not found on this machine"
            yield Problem(f"data.{name}", message, near_folder(location))


def check_program(job: JobSpec, python: Path | None = None) -> Iterator[Problem]:
    """Check that the job's module exists; warn about scripts that torchrun would start wrongly.

    These start processes of their own, or each rank would do all the work. `python` is the
    interpreter that runs the job, if it is on this machine.
    """
    yield from check_launch(job)
    if job.entrypoint.module is not None:
        yield from check_module(job, python)


def _installed() -> Iterator[Any]:
    from importlib.metadata import entry_points  # 25 ms, for backends of other packages only

    return iter(entry_points(group=_GROUP))
