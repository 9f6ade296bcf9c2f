"""The nouns of deploykit, as data: a job, its bundle, its plan, its handle, its status."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from deploykit.job.decode import NOT_EMPTY, Bounds, Duration, Help, Pattern, Size
from deploykit.lib import paths, terminal
from deploykit.lib.problem import Problem as Problem  # noqa: PLC0414 - one of the nouns

Arguments = tuple[str, ...]

NAME = Pattern(
    r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,39}",
    "at most 40 letters and digits, with single hyphens between them",
)
VARIABLE = Pattern(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")
CHANNEL = Pattern(r"[A-Za-z0-9][A-Za-z0-9_]{0,63}", "letters, digits and underscores")
STAGE_FOLDER = Pattern(
    r"[/$][^\x00-\x1f\x7f]*", "an absolute path, or a path that starts with a variable of the node"
)
OUTPUT = Pattern(
    r"[^/~\x00-\x1f\x7f][^\x00-\x1f\x7f]*",
    "a pattern relative to the working folder, such as snapshot.pt or checkpoints/*.pt",
)
METRIC = Pattern(r"[ -~]{1,100}", "a name of at most 100 printable ASCII characters")
PATH = Pattern(r"[^\x00-\x1f\x7f-][^\x00-\x1f\x7f]*", "a name or path without control characters")
BUDGET = Pattern(
    r"[0-9]{1,12}([.][0-9]{1,9})? ?[A-Z]{3}(/month)?( for [A-Za-z0-9][A-Za-z0-9_.-]{0,62})?",
    "an amount of money such as 2000 USD, 500 USD/month or 500 USD/month for vision",
)
PROFILE = Pattern(
    r"(torch|nsys):([2-9]|[1-9][0-9]{1,8}):[1-9][0-9]{0,8}|nsys|memory",
    "torch:FIRST:LAST or nsys:FIRST:LAST, with optimizer steps from 2 on, such as torch:20:25; "
    "or nsys; or memory",
)
MONEY = Pattern(r"[0-9]{1,12}([.][0-9]{1,9})? ?[A-Z]{3}", "an amount of money such as 50 USD")
MLFLOW = Pattern(
    r"https?://[^\s/@?#]+(/[^\s@?#]*)?"
    r"|arn:aws(-us-gov)?:sagemaker:[a-z0-9-]+:[0-9]{12}:mlflow-(tracking-server|app)/[A-Za-z0-9-]+",
    "an address such as https://mlflow.example.com without a user name (set "
    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead), or an ARN such as "
    "arn:aws:sagemaker:REGION:ACCOUNT:mlflow-tracking-server/NAME; to use a file store, start "
    "`mlflow server --backend-store-uri`",
)
FOLDER_OR_S3 = Pattern(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\x00-\x1f\x7f]*)?|[^:\x00-\x1f\x7f]+",
    "a folder without a colon in its name, or an s3:// prefix",
)
TRACKIO = Pattern(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", "a project such as digits or team-digits")
PROJECT = Pattern(
    r"([A-Za-z0-9][A-Za-z0-9_.-]{0,127}/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,127}",
    "a project such as digits or team/digits",
)


@dataclass(frozen=True)
class Entrypoint:
    """The script or module to run, and its arguments exactly as in `sys.argv[1:]`."""

    script: Annotated[
        str | None, Help("Python script, relative to `source`.", example="train.py")
    ] = None
    module: Annotated[
        str | None, Help("Module to run, as with `python -m`, instead of a script.")
    ] = None
    args: Annotated[
        Arguments,
        Help(
            "Arguments for the script or module, passed unchanged.",
            example="[--epochs, 5]",
        ),
    ] = ()
    launcher: Annotated[
        Literal["torchrun", "python"],
        Help(
            "`torchrun` starts every rank. `python` starts one plain process per node, for a "
            "script that starts its own processes, for example with `mp.spawn`.",
            "torchrun",
        ),
    ] = "torchrun"


@dataclass(frozen=True)
class Resources:
    """Nodes, ranks, memory and time that the job needs."""

    time_limit: Annotated[
        Duration, Help("Time limit of the job; optional with `local`.", example="30m"), Bounds(60)
    ] = 0
    """Seconds; 0 means no limit."""
    nodes: Annotated[
        int,
        Help("Number of nodes; `local` emulates them. `2:4`: at least 2 and at most 4.", "1"),
        Bounds(1, 10_000, text=r"\d+:\d+"),
    ] = 1
    min_nodes: Annotated[
        int | None,
        Help(
            "Minimum number of nodes: if nodes are lost, the job continues as long as this many "
            "remain. Without it, losing a node ends the job."
        ),
        Bounds(1, 10_000),
    ] = None
    processes_per_node: Annotated[
        int | None,
        Help("Ranks per node. Default: one per GPU, or 1.", example="2"),
        Bounds(1, 1024),
    ] = None
    gpus_per_node: Annotated[
        int,
        Help("GPUs per node; `local` uses the available GPUs.", example="0"),
        Bounds(0, 1024),
    ] = 0
    cpus_per_node: Annotated[
        int | None,
        Help("CPU cores per node; used only by Slurm. Default: the cluster's."),
        Bounds(1, 100_000),
    ] = None
    memory: Annotated[
        Size | None,
        Help("Memory per node; used only by Slurm. Default: the cluster's.", example="4GiB"),
    ] = None

    @property
    def processes(self) -> int:
        """Ranks on each node."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def node_range(self) -> str:
        """The value of torchrun's ``--nnodes``: ``4``, or ``2:4`` if it may change."""
        return str(self.nodes) if self.min_nodes is None else f"{self.min_nodes}:{self.nodes}"

    @property
    def world_size(self) -> int:
        """Ranks of all nodes; the maximum if the number of nodes may change."""
        return self.nodes * self.processes


@dataclass(frozen=True)
class Environment:
    """The source of the trainer's Python and packages."""

    conda: Annotated[
        str | None, Help("Conda environment, by name or folder.", example="train"), PATH
    ] = None
    venv: Annotated[
        str | None,
        Help("Folder of a virtual environment, relative to the job file.", example=".venv"),
        PATH,
    ] = None
    uv: Annotated[
        str | None,
        Help(
            "Folder of a uv project, relative to the job file. `uv run` updates its environment "
            "before the trainer starts. With slurm.host and on SageMaker, each node installs the "
            "project's uv.lock instead.",
            example=".",
        ),
        PATH,
    ] = None
    node_local: Annotated[
        bool,
        Help(
            "With `uv`: each node installs the project's uv.lock into its own `TMPDIR`, even if "
            "it can read the project's environment."
        ),
    ] = False
    extras: Annotated[
        tuple[str, ...],
        Help("With `uv`: project extras to install.", example="[cu128]"),
    ] = ()
    groups: Annotated[
        tuple[str, ...],
        Help(
            "With `uv`: dependency groups to install in addition to the project's default groups.",
            example="[train]",
        ),
    ] = ()
    modules: Annotated[
        tuple[Annotated[str, PATH], ...],
        Help("Environment modules to load first.", "[cuda/12.8]"),
    ] = ()

    def in_folder(self, folder: Path) -> Environment:
        """The same with absolute folders; ``~/`` may be another host's home."""

        def located(location: str | None) -> str | None:
            if location is None or location.startswith("~/"):
                return location
            return paths.absolute(location, folder)

        conda = self.conda if "/" not in (self.conda or "") else located(self.conda)
        return replace(self, conda=conda, venv=located(self.venv), uv=located(self.uv))

    @property
    def python(self) -> tuple[str, str] | None:
        """What brings the Python: `conda`, `venv` or `uv`, and its value. None: `modules` alone."""
        kinds = {"conda": self.conda, "venv": self.venv, "uv": self.uv}
        return next(((kind, value) for kind, value in kinds.items() if value is not None), None)


@dataclass(frozen=True)
class Track:
    """Trackers that receive the run's metrics."""

    mlflow: Annotated[
        str | None,
        Help(
            "Address of an MLflow server, or the ARN of one managed by SageMaker. The experiment's "
            "name is `MLFLOW_EXPERIMENT_NAME` if set, otherwise the job's name.",
            example="https://mlflow.example.com",
        ),
        MLFLOW,
    ] = None
    tensorboard: Annotated[
        str | None,
        Help(
            "Folder or s3:// prefix for event files; each run has its own subfolder.",
            example="s3://bucket/tensorboard",
        ),
        FOLDER_OR_S3,
    ] = None
    trackio: Annotated[
        str | None,
        Help(
            "Trackio project on the submitting machine. Requires the package `trackio` in "
            "deploykit's environment.",
            example="digits",
        ),
        TRACKIO,
    ] = None
    wandb: Annotated[
        str | None,
        Help(
            "Weights & Biases project; a run is uploaded after it ends. Requires the package "
            "`wandb` in deploykit's environment.",
            example="team/digits",
        ),
        PROJECT,
    ] = None

    def in_folder(self, folder: Path) -> Track:
        """The same with an absolute folder; addresses (s3://...) are kept."""
        if self.tensorboard is None:
            return self
        return replace(self, tensorboard=paths.absolute(self.tensorboard, folder))

    @property
    def chosen(self) -> dict[str, str]:
        """Where to send, by the name of the tracker."""
        every = {name: getattr(self, name) for name in TRACKERS}
        return {name: where for name, where in every.items() if where is not None}


TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")
"""The keys of `Track`."""


RECEIVER = Pattern(
    r"secret:(env|file|ssm|secretsmanager):[^\x00-\x1f\x7f]+|[a-z][a-z0-9+.-]*://[!-~]+",
    "an address such as https://hooks.example.com/runs, or secret:KIND:NAME, where KIND is env, "
    "file, ssm or secretsmanager",
)


@dataclass(frozen=True)
class Notify:
    """Receivers of notifications, and the events to report."""

    to: Annotated[
        tuple[Annotated[str, RECEIVER], ...],
        Help(
            "Receivers. An `https://` address receives a JSON POST; webhooks of Slack, Teams and "
            "Discord receive their own format. Other Apprise addresses, such as `mailto://`, "
            "require `deploykit[notify]`. Write an address with a token as `secret:KIND:NAME`.",
            example="[secret:env:SLACK_WEBHOOK]",
        ),
    ] = ()
    events: Annotated[
        tuple[
            Literal["started", "failed", "succeeded", "stalled", "preempted", "cap", "budget"],
            ...,
        ],
        Help(
            "Events to report. `cap`: the run was stopped at `max_cost`. `budget`: the run was "
            "refused because too little of its budget is left.",
            example="[failed, succeeded]",
        ),
    ] = ("failed", "succeeded", "stalled", "preempted", "cap", "budget")
    command: Annotated[
        Arguments,
        Help(
            "Command to run, with the message as JSON on standard input. A path that contains a "
            "slash is relative to the job file's folder.",
            example="[./page-me.sh]",
        ),
    ] = ()

    def in_folder(self, folder: Path) -> Notify:
        """The same with an absolute path of the command, unless it is looked up in PATH."""
        program, *words = self.command or ("",)
        if "/" not in program:
            return self
        return replace(self, command=(paths.absolute(program, folder), *words))


@dataclass(frozen=True)
class InputChannel:
    """The location of a channel's data, and whether to copy it before the ranks start."""

    SHORT = "path"
    """The key that a plain text sets."""

    path: Annotated[str, Help("Folder or s3:// prefix.", example="s3://bucket/train"), NOT_EMPTY]
    stage: Annotated[
        Literal["node", "shard", "shared"] | None,
        Help(
            "Copy the data before the ranks start, on this machine and on Slurm. `node`: copy all "
            "files to each node. `shard`: copy a share to each node; node I of N receives every "
            "Nth file in name order, starting with file I. `shared`: copy the files once, to a "
            "folder that all nodes share. SageMaker copies data itself: see `sagemaker.channels`."
        ),
    ] = None
    stage_folder: Annotated[
        str | None,
        Help(
            "Folder on the node for the copy; variables such as `$USER` are expanded there. "
            "Default: the first writable folder among `$SLURM_TMPDIR`, `/scratch`, `$TMPDIR` and "
            "`/tmp`; with `stage: shared`, `data` in the run folder.",
            example="/local/$USER",
        ),
        STAGE_FOLDER,
    ] = None

    def in_folder(self, folder: Path) -> InputChannel:
        """The same with an absolute path; addresses (s3://...) are kept."""
        return replace(self, path=paths.absolute(self.path, folder))


@dataclass(frozen=True)
class RestartPolicy:
    """When to restart failed ranks."""

    policy: Annotated[
        Literal["cause", "always", "never"],
        Help(
            "`cause`: restart unless a retry would make no progress, for example after a missing "
            "module, the same error at the same step twice, or the same error without a new "
            "checkpoint. `always`: restart after every failure. `never`: never restart the job, "
            "for any reason.",
        ),
    ] = "cause"
    back_off: Annotated[
        Duration,
        Help(
            "Pause before the second consecutive restart without a new checkpoint; it doubles "
            "with each further restart, up to 5 minutes.",
            example="10s",
        ),
        Bounds(0, 300),
    ] = 10


@dataclass(frozen=True)
class JobSpec:
    """The part of a job file that all backends share."""

    name: Annotated[str, Help("Name of the job; run ids begin with it.", example="digits"), NAME]
    entrypoint: Annotated[
        Entrypoint, Help("Script or module to run.", example="{script: train.py}")
    ]
    resources: Annotated[
        Resources, Help("Resources to request.", example="{nodes: 1, gpus_per_node: 4}")
    ] = field(default_factory=Resources)
    backend: Annotated[
        str | None,
        Help(
            "Backend to use if `--backend` is not given. Default: the environment variable "
            "`DEPLOYKIT_BACKEND`, then your config file, then `local`.",
            example="local",
        ),
        NOT_EMPTY,
    ] = None
    source: Annotated[
        str,
        Help("Source folder to send with the job, relative to the job file.", example="."),
        NOT_EMPTY,
    ] = "."
    environment: Annotated[
        Environment | None,
        Help(
            "Environment whose Python runs the trainer: one of `conda`, `venv` and `uv`, and the "
            "modules to load before it. SageMaker accepts only `uv`, whose packages are added "
            "to the image's Python.",
            example="{venv: .venv}",
        ),
    ] = None
    env: Annotated[
        Mapping[Annotated[str, VARIABLE], str],
        Help(
            "Environment variables for every rank. A value `secret:KIND:NAME` is looked up on the "
            "node and never shown; KIND is env, file, ssm or secretsmanager.",
            example='{OMP_NUM_THREADS: "1"}',
        ),
    ] = field(default_factory=dict)
    data: Annotated[
        Mapping[Annotated[str, CHANNEL], InputChannel],
        Help(
            "Input channels: each name maps to a folder or s3:// prefix. `DEPLOYKIT_DATA_<NAME>` "
            "contains the path on the node. Write a section instead of a string to set further "
            "keys, such as `stage`.",
            example="{train: /shared/data/train}",
        ),
    ] = field(default_factory=dict)
    output: Annotated[
        str | None,
        Help("Folder or s3:// prefix for results. Default: `output` in the run's folder."),
        NOT_EMPTY,
    ] = None
    checkpoints: Annotated[
        str | None,
        Help(
            "Folder or s3:// prefix for checkpoints. A run resumes from the newest one there. "
            "Default: `checkpoints` in the run's folder."
        ),
        NOT_EMPTY,
    ] = None
    keep_checkpoints: Annotated[
        int | None,
        Help(
            "Number of complete checkpoints to keep in `checkpoints`. Older ones, even from other "
            "scripts, are deleted while the job runs. Not available on SageMaker. Default: all.",
            example="3",
        ),
        Bounds(1, 1_000_000),
    ] = None
    outputs: Annotated[
        tuple[Annotated[str, OUTPUT], ...],
        Help(
            "Patterns for files and folders that the trainer writes to its working folder. "
            "Matches are copied to `output` when the trainer ends, and restored when the job is "
            "restarted or another run uses the same `checkpoints`. `**` matches any number of "
            "folders.",
            example='[snapshot.pt, "*.ckpt"]',
        ),
    ] = ()
    metrics: Annotated[
        Mapping[Annotated[str, METRIC], Annotated[str, NOT_EMPTY]],
        Help(
            "Metrics in log lines that `deploykit metrics` does not recognize: each name maps to "
            "a regular expression whose first group is the number. `step`, `total`, `epoch` and "
            "`epochs` report the run's progress.",
            example="{loss: 'loss is ([0-9.]+)'}",
        ),
    ] = field(default_factory=dict)
    track: Annotated[
        Track | None,
        Help(
            "Trackers that receive the metrics from the submitting machine. A restarted job "
            "continues its tracker run. `deploykit sync` sends any missing data."
        ),
    ] = None
    notify: Annotated[
        Notify | None,
        Help(
            "Receivers of a notification when the run ends, stalls or is preempted. Default: "
            "`notify` in your config file."
        ),
    ] = None
    retries: Annotated[
        int,
        Help(
            "How many times torchrun restarts all ranks after a rank fails. On SageMaker: how "
            "many times the service restarts the job after its own errors; it does not retry "
            "after errors in your code.",
            example="0",
        ),
        Bounds(0, 30),
    ] = 0
    restarts: Annotated[
        RestartPolicy | None,
        Help(
            "Whether failed ranks are restarted. `retries`, and on Slurm `slurm.restarts`, limit "
            "how often.",
            example="{policy: cause}",
        ),
    ] = None
    on_stall: Annotated[
        Literal["report", "dump", "restart"],
        Help(
            "What to do if the ranks stall. `report`: report the stall. `dump`: also dump the "
            "ranks' stacks. `restart`: also restart the ranks."
        ),
    ] = "dump"
    profile: Annotated[
        str | None,
        Help(
            "Profile these optimizer steps on all ranks with PyTorch's profiler (`torch:20:25`) "
            "or Nsight Systems (`nsys:20:25`; `nsys` for the whole run); `memory` saves a "
            "snapshot of a GPU's allocations when it runs out of memory. Same as `deploykit "
            "submit --profile`.",
            example="torch:20:25",
        ),
        PROFILE,
    ] = None
    preflight: Annotated[
        bool,
        Help(
            "Test the nodes and the network before the trainer starts, and stop a job that would "
            "hang. Same as `deploykit submit --preflight`."
        ),
    ] = False
    debug: Annotated[
        bool,
        Help(
            "Enable debug output from NCCL, c10d and PyTorch. Same as `deploykit submit --debug`."
        ),
    ] = False
    max_cost: Annotated[
        str | None,
        Help("Refuse a job that could cost more. Same as `deploykit submit --max-cost`.", "50 USD"),
        MONEY,
    ] = None
    budget: Annotated[
        str | None,
        Help(
            "Refuse a job that could exceed this budget, which several runs share.", "500 USD/month"
        ),
        BUDGET,
    ] = None
    stop_at_cap: Annotated[
        bool, Help("Stop the job before it exceeds `max_cost`, instead of refusing it.")
    ] = False
    max_bundle: Annotated[
        Size, Help("Maximum size of the source bundle.", example="100MiB"), Bounds(1)
    ] = 100 * 1024**2
    log_limit: Annotated[
        Size,
        Help(
            "Maximum size of each node's log, on this machine and on Slurm. Output beyond that "
            "is discarded, except for the last 64 KiB. On SageMaker, CloudWatch keeps all "
            "output.",
            example="1GiB",
        ),
        Bounds(1),
    ] = 1024**3

    def in_folder(self, folder: Path) -> JobSpec:
        """The same job with absolute locations; addresses (s3://...) are kept."""
        return replace(
            self,
            source=paths.absolute(self.source, folder),
            data={name: channel.in_folder(folder) for name, channel in self.data.items()},
            environment=self.environment and self.environment.in_folder(folder),
            track=self.track and self.track.in_folder(folder),
            notify=self.notify and self.notify.in_folder(folder),
            output=self.output and paths.absolute(self.output, folder),
            checkpoints=self.checkpoints and paths.absolute(self.checkpoints, folder),
        )


class State(enum.Enum):
    """The state of a run, the same on every backend."""

    UNSENT = "unsent"
    """The row was written, but there is no job: submit was refused or interrupted."""
    SUBMITTING = "submitting"
    """The row was written, and the job is not yet confirmed."""
    QUEUED = "queued"
    BLOCKED = "blocked"
    """Queued, but it can never start as it is."""
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The target cannot be reached, or has no record of the job: then `native` is `NO_JOB`."""

    @property
    def final(self) -> bool:
        """Whether the run has finished, or was never sent."""
        return self in _FINAL


_FINAL = {State.SUCCEEDED, State.FAILED, State.CANCELLED, State.UNSENT}


NO_JOB = "no job"
"""`Status.native` if the target reports that it has no job of the run."""


class Status(NamedTuple):
    """The status of a run. `native` is the target's own state; `reason` explains the state.

    `output` is the location of the results, if the target reports one.
    """

    state: State
    native: str = ""
    reason: str = ""
    exit_code: int | None = None
    started: datetime | None = None
    finished: datetime | None = None
    output: str = ""
    billed: float | None = None
    """Billed seconds of all attempts; None if the target does not report them."""


@dataclass(frozen=True)
class Handle:
    """The address of a job at its target; as text ``slurm://prod/4242``."""

    backend: str
    target: str
    id: str
    run: str
    folder: str
    """The run folder, on the machine that submitted."""
    status: Status | None = field(default=None, compare=False, repr=False)
    """The status that `submit` already received; None: the job is queued."""

    def __str__(self) -> str:
        return f"{self.backend}://{self.target}/{self.id}"


class Entry(NamedTuple):
    """A file or link of a bundle. `path` is relative, with forward slashes."""

    path: str
    mode: int = 0o644
    size: int = 0
    """Bytes; 0 for a link."""
    target: str | None = None
    """The target of a link; None for a file."""
    content: bytes | None = None
    """The content of a file of the node plane; None for a file of the source folder."""


class Bundle(NamedTuple):
    """A scanned source tree. `hash` is the SHA-256 of its tar stream."""

    source: Path
    entries: tuple[Entry, ...]
    hash: str
    commit: str | None = None
    kept_back: tuple[str, ...] = ()
    """Files left out because they contain a private key."""
    warnings: tuple[Problem, ...] = ()
    """About excluded private keys, and tokens in the bundle."""

    @property
    def size(self) -> int:
        """Bytes of all files, uncompressed."""
        return sum(entry.size for entry in self.entries)


class DataFile(NamedTuple):
    """A file of a `DataFolder`. `path` is relative, with forward slashes."""

    path: str
    size: int
    checksum: str
    """SHA-256 as S3 stores it; see `deploykit.bundle.data_folder`."""
    stamp: tuple[int, ...]
    """Times and inode, which change if the file does."""
    parts: tuple[str, ...] = ()
    """The checksum of each part; empty for a file that is sent in one."""


class DataFolder(NamedTuple):
    """A folder or single file of `data` on this machine, which `submit` uploads."""

    channel: str
    source: Path
    files: tuple[DataFile, ...] = ()
    is_file: bool = False
    manifest: str = ""
    """Paths, sizes and checksums of all files, as JSON."""
    hash: str = ""
    """SHA-256 of the manifest, which names the content."""
    target: str = ""
    """The address of the files, chosen by the backend."""
    warnings: tuple[Problem, ...] = ()
    """About files that are left out."""

    @property
    def top(self) -> Path:
        """The folder of the files."""
        return self.source.parent if self.is_file else self.source

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class Plan(NamedTuple):
    """Everything that `submit` will send. A dry run prints `text`."""

    backend: str
    target: str
    """Where the job will run: a host, a cluster, a region. Also the handle's `target`."""
    run: str
    text: str
    language: Literal["sh", "json"]
    job: JobSpec
    options: Any
    bundle: Bundle
    output: str = ""
    """The location of the results, as the user reaches it."""
    summary: str = ""
    """What will be billed, in one line that `submit` prints first; may be empty."""
    sent_with: str = ""
    """Names of the credentials that will send it, such as a profile; empty: the environment's."""
    data: tuple[DataFolder, ...] = ()
    """Folders of `data` that are uploaded unless the target has them."""


class LogLine(NamedTuple):
    """One line of a log, without its newline. `time` has a time zone, UTC.

    ``str(line)`` is safe to print; `text` may contain control characters, because logs are
    untrusted. Invalid UTF-8 becomes surrogates in `text` (PEP 383), so that no byte is lost.
    """

    text: str
    node: int | None = None
    rank: int | None = None
    time: datetime | None = None
    task: int | None = None
    """The task of a job array."""
    bar: bool = False
    """Whether a later line of the same progress bar overwrites it."""

    @property
    def origin(self) -> str:
        """A prefix with its task and rank, or its node if no rank wrote it."""
        task = f"[task {self.task}] " if self.task is not None else ""
        if self.rank is not None:
            return f"{task}[rank {self.rank}] "
        return task + (f"[node {self.node}] " if self.node is not None else "")

    def __str__(self) -> str:
        return self.origin + " ".join(terminal.log(self.text, colors=False))
