"""The `slurm` section of a job file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from deploykit import paths
from deploykit.fields import NOT_EMPTY, Bounds, Help, Pattern

OPTION = Pattern(r"[A-Za-z][A-Za-z0-9-]+", "the long name of an sbatch option, without dashes")
RUN = Pattern(r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,62}", "the id of a run")


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
class Container:
    """The image in which the launcher and the trainer run."""

    image: Annotated[
        str,
        Help("Image: a file that the nodes see, or an address that the runtime understands."),
        NOT_EMPTY,
    ]
    runtime: Annotated[
        Literal["pyxis", "apptainer"],
        Help("What starts it: Pyxis with enroot, by options of srun; or Apptainer."),
    ] = "pyxis"
    mounts: Annotated[
        tuple[str, ...],
        Help(
            "More folders to be seen inside, `FOLDER` or `FOLDER:INSIDE`. Those of the run and "
            "of the job file are seen anyway.",
            "[/scratch]",
        ),
    ] = ()


@dataclass(frozen=True)
class Options:
    """The `slurm` section of a job file."""

    host: Annotated[
        str | None,
        Help(
            "Login node to work from over OpenSSH, as `ssh` knows it. Default: this machine.",
            example="login1",
        ),
    ] = None
    folder: Annotated[
        str | None,
        Help(
            "With `host`: folder there for runs and bundles, which every node sees.",
            example="/shared/ada/deploykit",
        ),
    ] = None
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
    licenses: Annotated[
        str | None, Help("Licences to hold, as the site names them.", example="matlab:2")
    ] = None
    mail_type: Annotated[
        str | None, Help("Events that Slurm sends mail about.", example='"END,FAIL"')
    ] = None
    mail_user: Annotated[str | None, Help("Who gets that mail. Default: you.")] = None
    after: Annotated[
        Mapping[Annotated[str, RUN], Literal["succeeded", "failed", "ended"]],
        Help(
            "Runs that must have ended before this one starts, by run id, and how. A run that "
            "ends otherwise cancels this one.",
            example="{prepare-1: succeeded}",
        ),
    ] = field(default_factory=dict)
    array: Annotated[
        int | None,
        Help(
            "Tasks of a job array, all sent by one call. Each has its number in "
            "`SLURM_ARRAY_TASK_ID`, from 0, and a folder of that name below output and checkpoints."
        ),
        Bounds(1, 1_000_000),
    ] = None
    at_once: Annotated[
        int | None, Help("Tasks of the array that may run at a time."), Bounds(1)
    ] = None
    python: Annotated[
        str | None,
        Help(
            "Python on the nodes that runs the trainer. Default: the one that runs deploykit; "
            "with `host` or in a container `python3`.",
            example="/shared/venv/bin/python",
        ),
    ] = None
    modules: Annotated[
        tuple[str, ...], Help("Environment modules to load first.", "[cuda/12.8]")
    ] = ()
    setup: Annotated[
        tuple[str, ...],
        Help("Shell lines that the batch script runs before srun.", "[ulimit -c 0]"),
    ] = ()
    container: Annotated[
        Container | None, Help("Image to run in. Default: none, the nodes as they are.")
    ] = None
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
            example='{nice: "100", contiguous: ""}',
        ),
    ] = field(default_factory=dict)

    def run_folder(self, run: str) -> Path:
        """The run's folder, as the nodes see it."""
        return self.home / "runs" / run

    @property
    def home(self) -> Path:
        """The folder of all runs, as the nodes see it."""
        return Path(self.folder) if self.host and self.folder else paths.state()
