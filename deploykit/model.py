"""The nouns of deploykit, as data only: a job, a plan for it, a handle on it, its status."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from deploykit.errors import Problem as Problem  # noqa: PLC0414 - a noun, which errors carry
from deploykit.fields import NOT_EMPTY, Bounds, Duration, Help, Pattern, Size

NAME = Pattern(
    r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,39}",
    "letters, digits and single inner hyphens, at most 40 (SageMaker's and Slurm's common ground)",
)
VARIABLE = Pattern(r"[A-Za-z_][A-Za-z0-9_]*", "an environment variable's name")
CHANNEL = Pattern(r"[A-Za-z0-9][A-Za-z0-9_]{0,63}", "letters, digits and underscores")

Arguments = tuple[str, ...]


@dataclass(frozen=True)
class Entrypoint:
    """What to run: a script or a module, and its arguments exactly as `sys.argv[1:]` will be."""

    script: Annotated[
        str | None, Help("Python script, relative to `source`.", example="train.py")
    ] = None
    module: Annotated[
        str | None, Help("Module to run as `python -m` does, instead of a script.")
    ] = None
    args: Annotated[
        Arguments,
        Help("Arguments, exact: flags, positionals, repeats, blanks.", example="[--epochs, 5]"),
    ] = ()


@dataclass(frozen=True)
class Resources:
    """What the job needs, per node where it says so."""

    time_limit: Annotated[
        Duration, Help("Longest run time; the job is stopped after it.", example="30m"), Bounds(60)
    ]
    nodes: Annotated[
        int, Help("Machines; `local` emulates several on this one.", example="1"), Bounds(1, 10_000)
    ] = 1
    processes_per_node: Annotated[
        int | None,
        Help("Ranks on each node. Default: one for each GPU, or 1.", example="2"),
        Bounds(1, 1024),
    ] = None
    gpus_per_node: Annotated[
        int, Help("GPUs on each node; `local` takes what is there.", example="0"), Bounds(0, 1024)
    ] = 0
    cpus_per_node: Annotated[
        int | None,
        Help("CPU cores on each node. Default: the backend's; only Slurm reads it."),
        Bounds(1, 100_000),
    ] = None
    memory: Annotated[
        Size | None,
        Help("Memory on each node. Default: the backend's; only Slurm reads it.", example="4GiB"),
    ] = None

    @property
    def processes(self) -> int:
        """Ranks on each node."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes


@dataclass(frozen=True)
class JobSpec:
    """A job file's neutral part: what is the same on every backend."""

    name: Annotated[str, Help("Name of the job; run ids begin with it.", example="digits"), NAME]
    entrypoint: Annotated[Entrypoint, Help("What to run.")]
    resources: Annotated[Resources, Help("What the job needs.")]
    source: Annotated[
        str,
        Help("Folder that travels with the job, relative to the job file.", example="."),
        NOT_EMPTY,
    ] = "."
    env: Annotated[
        Mapping[Annotated[str, VARIABLE], str],
        Help(
            "Environment of every rank. A value `secret:KIND:NAME` is looked up on the node and "
            "shown nowhere; kinds: env, file, ssm, secretsmanager.",
            example='{OMP_NUM_THREADS: "1"}',
        ),
    ] = field(default_factory=dict)
    data: Annotated[
        Mapping[Annotated[str, CHANNEL], Annotated[str, NOT_EMPTY]],
        Help(
            "Input channels, name to folder or s3:// prefix; `DEPLOYKIT_DATA_<NAME>` holds the "
            "folder on the node.",
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
            "Folder or s3:// prefix for checkpoints; runs that name the same one resume from it. "
            "Default: `checkpoints` in the run's folder."
        ),
        NOT_EMPTY,
    ] = None
    retries: Annotated[
        int,
        Help(
            "How often torchrun starts all ranks again after one has failed. SageMaker: how often "
            "the service does, after faults of its own only.",
            example="0",
        ),
        Bounds(0, 30),
    ] = 0
    preflight: Annotated[
        bool,
        Help(
            "Test the network between the nodes for at most 30 seconds before the trainer starts, "
            "and stop the job where it would fail or hang. `deploykit submit --preflight` too."
        ),
    ] = False
    debug: Annotated[
        bool,
        Help(
            "NCCL, c10d and PyTorch's flight recorder say what they do, into files for each "
            "process where they can. `deploykit submit --debug` too."
        ),
    ] = False
    max_bundle: Annotated[
        Size, Help("Largest source bundle that may travel.", example="100MiB"), Bounds(1)
    ] = 100 * 1024**2


class State(enum.Enum):
    """A run's state, the same words on every backend."""

    UNSENT = "unsent"
    """The row was written but the far side has no such job: submit was interrupted."""
    SUBMITTING = "submitting"
    """The row was written and the job not yet confirmed."""
    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The far side cannot be asked, or no longer knows the job."""

    @property
    def final(self) -> bool:
        return self in _FINAL


_FINAL = {State.SUCCEEDED, State.FAILED, State.CANCELLED, State.UNSENT}


@dataclass(frozen=True)
class Status:
    """What is known of a run. `native` is the backend's own word, `reason` a sentence.

    `output` is where the results are, from a backend that is told so by the far side.
    """

    state: State
    native: str = ""
    reason: str = ""
    exit_code: int | None = None
    started: datetime | None = None
    finished: datetime | None = None
    output: str = ""


@dataclass(frozen=True)
class Handle:
    """A job on the far side. `str(handle)` is its address, ``slurm://prod/4242``."""

    backend: str
    target: str
    id: str
    run: str
    folder: str
    """The run's folder on the machine that submits."""

    def __str__(self) -> str:
        return f"{self.backend}://{self.target}/{self.id}"


@dataclass(frozen=True)
class Entry:
    """A file or link of the bundle. `path` is relative, with forward slashes."""

    path: str
    mode: int = 0o644
    size: int = 0
    """Bytes; 0 for a link."""
    target: str | None = None
    """Where a link points; None for a file."""
    content: bytes | None = None
    """Content of a file of the node plane; None: read from the source folder."""


@dataclass(frozen=True)
class Bundle:
    """A source tree as it was when it was scanned. `hash` is the SHA-256 of its tar stream."""

    source: Path
    entries: tuple[Entry, ...]
    hash: str
    commit: str | None = None
    kept_back: tuple[str, ...] = ()
    """Files that stay behind because a private key is in them."""
    warnings: tuple[Problem, ...] = ()
    """What is doubtful about the files: keys that stay behind, tokens that travel."""

    @property
    def size(self) -> int:
        """Bytes of all files, uncompressed."""
        return sum(entry.size for entry in self.entries)


@dataclass(frozen=True)
class Plan:
    """Everything that `submit` will send. Printing `text` is the dry run."""

    backend: str
    target: str
    """Where it will run: a host, a cluster, a region. The handle's `target`."""
    run: str
    text: str
    language: Literal["sh", "json"]
    job: JobSpec
    options: Any
    bundle: Bundle
    output: str = ""
    """Where the results will be, as the user can reach them."""


@dataclass(frozen=True)
class Profile:
    """What a target has and allows, as `probe` recorded it."""

    path: Path
    """The file that keeps it."""
    facts: Mapping[str, Any]
    """The same as plain data."""
    summary: tuple[str, ...]
    """The same as lines for a person."""


@dataclass(frozen=True)
class LogLine:
    """One line of a log, without its line end. `time` is aware, in UTC.

    Bytes that are no UTF-8 stand in `text` as surrogates (PEP 383), so that none is lost.
    """

    text: str
    node: int | None = None
    rank: int | None = None
    time: datetime | None = None
    task: int | None = None
    """The task of a job array."""
