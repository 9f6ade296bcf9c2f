"""The `slurm` section of a job file, as users write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from deploykit.job.decode import NOT_EMPTY, Bounds, Help, Pattern
from deploykit.job.model import JobSpec
from deploykit.lib import paths

OPTION = Pattern(r"[A-Za-z][A-Za-z0-9-]+", "the long name of an sbatch option, without dashes")
SRUN = Pattern(r"--[a-z][a-z0-9-]+(=[^\x00-\x1f\x7f]*)?", "an srun option such as --auto-resume=1")
PRICE = Pattern(
    r"[0-9]{1,9}([.][0-9]{1,9})? ?[A-Z]{3}/([gG][pP][uU]|node|[cC][pP][uU]|billing)-hour",
    "a price such as 2.10 USD/gpu-hour, or per node-hour, cpu-hour or billing-hour",
)
RUN = Pattern(r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,62}", "a run id")


@dataclass(frozen=True)
class Restarts:
    """Maximum number of restarts, counted separately for each reason."""

    time_limit: Annotated[
        int,
        Help("Restarts after the time limit, if the attempt saved a checkpoint."),
        Bounds(0, 10_000),
    ] = 100
    preemption: Annotated[int, Help("Restarts after a preemption."), Bounds(0, 10_000)] = 100
    node_failure: Annotated[int, Help("Restarts after a node failure."), Bounds(0, 10_000)] = 10
    transient: Annotated[
        int,
        Help(
            "Restarts after a rank failed because of the network, storage, a GPU or another "
            "process, if `restarts.policy` is `cause`."
        ),
        Bounds(0, 10_000),
    ] = 10
    error: Annotated[
        int,
        Help("Restarts after any other rank failure, once torchrun has used up `retries`."),
        Bounds(0, 10_000),
    ] = 0


@dataclass(frozen=True)
class Container:
    """The container in which the launcher and the trainer run."""

    image: Annotated[
        str,
        Help("Container image: a file that all nodes can read, or an address to pull from."),
        NOT_EMPTY,
    ]
    runtime: Annotated[
        Literal["pyxis", "apptainer"],
        Help("Container runtime: `pyxis` (with enroot, through srun options) or `apptainer`."),
    ] = "pyxis"
    mounts: Annotated[
        tuple[str, ...],
        Help(
            "Additional folders to mount, as `FOLDER` or `FOLDER:INSIDE`. The run folder and the "
            "job file's folder are always mounted.",
            "[/scratch]",
        ),
    ] = ()


@dataclass(frozen=True)
class Options:
    """The `slurm` section of a job file."""

    host: Annotated[
        str | None,
        Help(
            "Login node to submit from: a host name or `ssh` alias. Default: this machine.",
            example="login1",
        ),
    ] = None
    folder: Annotated[
        str | None,
        Help(
            "With `host`: folder on that host for runs and bundles. Every node must be able to "
            "read the folder.",
            example="/shared/ada/deploykit",
        ),
    ] = None
    partition: Annotated[str | None, Help("Partition. Default: the site's.", example="gpu")] = None
    account: Annotated[str | None, Help("Account to charge. Default: yours.")] = None
    qos: Annotated[str | None, Help("Quality of service. Default: the site's.")] = None
    constraint: Annotated[
        str | None, Help("Node features to require.", example='"a100&nvlink"')
    ] = None
    reservation: Annotated[str | None, Help("Reservation to use.")] = None
    nodelist: Annotated[str | None, Help("Nodes to use.", example="node[01-02]")] = None
    exclude: Annotated[str | None, Help("Nodes to avoid.", example="node07")] = None
    exclusive: Annotated[bool, Help("Do not share the nodes with other jobs.")] = False
    gres_style: Annotated[
        Literal["gpus-per-node", "gres"],
        Help("How to request GPUs: with `--gpus-per-node=N` or with `--gres=gpu:N`."),
    ] = "gpus-per-node"
    licenses: Annotated[
        str | None, Help("Licenses to request, by the site's names.", example="matlab:2")
    ] = None
    mail_type: Annotated[
        str | None, Help("Events for which Slurm sends mail.", example='"END,FAIL"')
    ] = None
    mail_user: Annotated[str | None, Help("Recipient of the mail. Default: you.")] = None
    after: Annotated[
        Mapping[Annotated[str, RUN], Literal["succeeded", "failed", "ended"]],
        Help(
            "Runs that must end before this run starts, and how each must end, by run id. If a "
            "run ends differently, Slurm cancels this run.",
            example="{prepare-1: succeeded}",
        ),
    ] = field(default_factory=dict)
    array: Annotated[
        int | None,
        Help(
            "Number of tasks in a job array. Each task finds its number, counted from 0, in "
            "`SLURM_ARRAY_TASK_ID`, and uses the subfolder with that name in output and "
            "checkpoints."
        ),
        Bounds(1, 1_000_000),
    ] = None
    at_once: Annotated[
        int | None, Help("Maximum number of array tasks that run at the same time."), Bounds(1)
    ] = None
    tasks: Annotated[
        tuple[Annotated[int, Bounds(0, 999_999)], ...],
        Help(
            "Run only these tasks of the array, by number. `deploykit rerun RUN --failed` sets "
            "this.",
            example="[2, 5]",
        ),
    ] = ()
    python: Annotated[
        str | None,
        Help(
            "Python that runs the trainer on the nodes; `~/` is your home folder there. Default: "
            "the Python that `setup` or `modules` activates, else `python3` with `host` or in a "
            "container, else the Python that runs deploykit. See also `environment`.",
            example="/shared/venv/bin/python",
        ),
    ] = None
    modules: Annotated[
        tuple[str, ...], Help("Environment modules to load first.", "[cuda/12.8]")
    ] = ()
    setup: Annotated[
        tuple[str, ...],
        Help(
            "Shell lines to run in the batch script before srun. A failing line ends the job.",
            "[ulimit -c 0]",
        ),
    ] = ()
    container: Annotated[Container | None, Help("Container to run the job in. Default: none.")] = (
        None
    )
    signal_seconds: Annotated[
        int | None,
        Help(
            "How many seconds before the time limit Slurm sends SIGUSR2 to the job. The signal "
            "can arrive up to 60 s early. Default: 90, or half of a short time limit."
        ),
        Bounds(1, 65535, "s"),
    ] = None
    restarts: Annotated[
        Restarts,
        Help("Maximum number of restarts by reason. If all are 0, the job never restarts."),
    ] = field(default_factory=Restarts)
    checkpoint_folder: Annotated[
        str | None,
        Help(
            "Folder on each node, for example on a local disk, for checkpoints to upload to a "
            "bucket. The path can contain the node's variables. Default: the run's folder, which "
            "all nodes share.",
            example="/scratch",
        ),
        NOT_EMPTY,
    ] = None
    site: Annotated[
        str | None,
        Help(
            "Site profile to check the job against: a cluster's name or a file. On the cluster, "
            "`deploykit backends slurm --probe` writes a profile.",
            example="prod",
        ),
        NOT_EMPTY,
    ] = None
    price: Annotated[
        str | None,
        Help(
            "Price that the site charges, for `deploykit cost` and `max_cost`. With "
            "`billing-hour`, the partition's TRESBillingWeights in the site profile apply. "
            "Default: no charge.",
            example="2.10 USD/gpu-hour",
        ),
        PRICE,
    ] = None
    extra: Annotated[
        Mapping[Annotated[str, OPTION], str],
        Help(
            "Other sbatch options, by their long names; use an empty value for a flag.",
            example='{nice: "100", contiguous: ""}',
        ),
    ] = field(default_factory=dict)
    srun: Annotated[
        tuple[Annotated[str, SRUN], ...],
        Help(
            "Other options for the srun command that starts the launchers.",
            example="[--auto-resume=1]",
        ),
    ] = ()

    def allowed(self, job: JobSpec) -> Restarts:
        """How often the job may be restarted: only the policy `cause` knows what passes."""
        policy = job.restarts.policy if job.restarts else "cause"
        if policy == "never":
            return Restarts(0, 0, 0, 0, 0)
        return self.restarts if policy == "cause" else replace(self.restarts, transient=0)

    def run_folder(self, run: str) -> Path:
        """The path of a run's folder on the nodes."""
        return self.home / "runs" / run

    @property
    def home(self) -> Path:
        """The path of deploykit's folder on the nodes: `folder` with a host, else `paths.state`."""
        return Path(self.folder) if self.host and self.folder else paths.state()
