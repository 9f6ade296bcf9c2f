"""The `slurm` section of a job file, as users write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from deploykit.job.decode import NOT_EMPTY, Bounds, Help, Pattern
from deploykit.lib import paths

OPTION = Pattern(r"[A-Za-z][A-Za-z0-9-]+", "the long name of an sbatch option, without dashes")
SRUN = Pattern(
    r"--[a-z][a-z0-9-]+(=[^\x00-\x1f\x7f]*)?", "an option of srun, such as --auto-resume=1"
)
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
            "Additional folders to mount, as `FOLDER` or `FOLDER:INSIDE`. The folders of the run "
            "and of the job file are always mounted.",
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
            "Shell lines that the batch script runs before srun. A failing line ends the job.",
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
    checkpoint_folder: Annotated[
        str | None,
        Help(
            "Folder of each node for checkpoints that go to a bucket, such as a local disk; may "
            "name variables of the nodes. Default: the run's folder, which all nodes share.",
            example="/scratch",
        ),
        NOT_EMPTY,
    ] = None
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
            "What the site charges, for `deploykit cost` and `max_cost`. With `billing-hour`, "
            "the partition's TRESBillingWeights in the site profile apply. Default: nothing.",
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
    srun: Annotated[
        tuple[Annotated[str, SRUN], ...],
        Help(
            "Other options of the srun that starts the launchers, such as HyperPod's.",
            example="[--auto-resume=1]",
        ),
    ] = ()

    def run_folder(self, run: str) -> Path:
        """The path of a run's folder on the nodes."""
        return self.home / "runs" / run

    @property
    def home(self) -> Path:
        """The path of deploykit's folder on the nodes: `folder` with a host, else `paths.state`."""
        return Path(self.folder) if self.host and self.folder else paths.state()
