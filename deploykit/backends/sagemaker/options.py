"""The `sagemaker:` section of the job file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from deploykit.backends.sagemaker import sections
from deploykit.backends.sagemaker.sections import Channel, InstanceGroup, ModelParallel
from deploykit.fields import Bounds, Duration, Help
from deploykit.model import CHANNEL

Distribution = Literal[
    "torch_distributed",
    "pytorchddp",
    "smdistributed.dataparallel",
    "smdistributed.modelparallel",
    "mpi",
    "none",
]

METRICS = {
    "validation:loss": r"epoch \d+: validation loss ([0-9.]+)",
    "validation:accuracy": r"epoch \d+: validation loss [0-9.]+, accuracy ([0-9.]+)",
    "test:accuracy": r"test accuracy ([0-9.]+)",
}
"""What `entrypoints/train.py` prints at the end of each epoch and of the run."""


@dataclass(frozen=True)
class Options:
    """What only SageMaker needs to know. The instance count is `resources.nodes`.

    Limits: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
    """

    role: Annotated[
        str,
        Help(
            "Execution role of the job, as a full ARN: a name would have to be looked up. "
            "`aws iam get-role --role-name NAME --query Role.Arn` prints it.",
            example="arn:aws:iam::123456789012:role/training",
        ),
        sections.ROLE,
    ]
    bucket: Annotated[
        str,
        Help(
            "S3 bucket, in the job's region, for the source and, without `output`, the results.",
            example="my-bucket",
        ),
        sections.BUCKET,
    ]
    instance_type: Annotated[
        str | None,
        Help("Type of each machine; this or `instance_groups`.", example="ml.g5.12xlarge"),
        sections.INSTANCE_TYPE,
    ] = None
    instance_groups: Annotated[
        tuple[InstanceGroup, ...],
        Help("A heterogeneous cluster instead, of at most 5 groups; only for `mpi` and SMDDP."),
    ] = ()
    distribution_group: Annotated[
        str | None,
        Help(
            "The one of `instance_groups` that trains. `resources` describes its machines; those "
            "of the others run the program too, without ranks.",
            example="gpu",
        ),
        sections.GROUP,
    ] = None
    bucket_owner: Annotated[
        str | None,
        Help(
            "Account that owns the bucket; S3 refuses every request to a bucket that is another's. "
            "Default: the account in `role`.",
            example='"123456789012"',
        ),
        sections.ACCOUNT,
    ] = None
    prefix: Annotated[str, Help("Folder in the bucket.", example="deploykit"), sections.PREFIX] = (
        "deploykit"
    )
    region: Annotated[
        str | None,
        Help("Region of the job. Default: AWS_REGION, then AWS_DEFAULT_REGION.", "us-east-1"),
        sections.REGION,
    ] = None
    framework_version: Annotated[
        str | None,
        Help("PyTorch of AWS's own image, 2.0.0 to 2.8.0; this or `image_uri`.", example="2.8.0"),
        sections.VERSION,
    ] = None
    py_version: Annotated[
        str | None,
        Help("Python of AWS's own image. Default: the only one of that version.", example="py312"),
        sections.PYTHON,
    ] = None
    image_uri: Annotated[
        str | None,
        Help("Container image instead of `framework_version`; needed for later PyTorch."),
        sections.IMAGE,
    ] = None
    image_entrypoint: Annotated[
        tuple[Annotated[str, sections.LINE], ...],
        Help(
            "The image's own ENTRYPOINT, as `docker inspect` shows it. With it each container "
            "hashes the source first, and starts nothing of a source that was replaced.",
            example="[bash, -m, start_with_right_hostname.sh]",
        ),
    ] = ()
    distribution: Annotated[
        Distribution,
        Help(
            "What starts the ranks: `torch_distributed` is torchrun, `mpi` is mpirun. `pytorchddp` "
            "runs as `smdistributed.dataparallel` (SMDDP): the SDK has rewritten it since 2.221.1."
        ),
    ] = "torch_distributed"
    mpi_options: Annotated[
        str | None,
        Help(
            "More options for mpirun, cut at blanks; for `mpi`, `pytorchddp` and "
            "`smdistributed.dataparallel`.",
            example='"-x NCCL_ALGO=Ring --verbose"',
        ),
        sections.LINE,
    ] = None
    model_parallel: Annotated[
        ModelParallel | None, Help("Parameters of `smdistributed.modelparallel`.")
    ] = None
    volume_size: Annotated[
        int,
        Help("Disk of each machine in GB; types with NVMe disks ignore it.", example="30"),
        Bounds(1, 16384),
    ] = 30
    volume_kms_key: Annotated[
        str | None, Help("KMS key of that disk; refused on types with NVMe disks."), sections.KEY
    ] = None
    channels: Annotated[
        Mapping[Annotated[str, CHANNEL], Channel],
        Help("How channels are read, by the name in `data`, or channels that only SageMaker has."),
    ] = field(default_factory=dict)
    output_kms_key: Annotated[str | None, Help("KMS key of the results in S3."), sections.KEY] = (
        None
    )
    output_compression: Annotated[
        Literal["gzip", "none"],
        Help("`none`: results stay single files; quicker for large models."),
    ] = "gzip"
    spot: Annotated[
        bool, Help("Managed spot training: cheaper, and may be interrupted.", example="false")
    ] = False
    max_wait: Annotated[
        Duration | None,
        Help("With `spot`: longest time from submit to end, at least `time_limit`.", example="2h"),
        Bounds(1),
    ] = None
    keep_alive: Annotated[
        Duration | None,
        Help("Keep the machines for the next job (warm pool), at most 1h; billed.", example="10m"),
        Bounds(1),
    ] = None
    training_plan: Annotated[
        str | None, Help("Reserved machines to run on, by the plan's ARN."), sections.PLAN
    ] = None
    subnets: Annotated[
        tuple[Annotated[str, sections.ID], ...],
        Help("Subnets of your VPC, at most 16, with `security_group_ids`."),
    ] = ()
    security_group_ids: Annotated[
        tuple[Annotated[str, sections.ID], ...],
        Help("Security groups, at most 5; one must let its own members in and out on all ports."),
    ] = ()
    encrypt_inter_container_traffic: Annotated[
        bool, Help("Encrypt what the machines send each other; slower.", example="false")
    ] = False
    network_isolation: Annotated[
        bool,
        Help(
            "Cut the containers off from everything but each other. The source then comes as a "
            "channel, and secrets cannot be looked up.",
            example="false",
        ),
    ] = False
    tags: Annotated[
        Mapping[Annotated[str, sections.TAG], Annotated[str, sections.TAG]],
        Help("Tags of the job, for cost reports, at most 50.", example="{team: vision}"),
    ] = field(default_factory=dict)
    metric_definitions: Annotated[
        Mapping[Annotated[str, sections.METRIC], Annotated[str, sections.REGEX]],
        Help(
            "Numbers that SageMaker reads out of the log, name to regular expression with one "
            "group, at most 40. Default: those that our own trainer prints; `{}` for none.",
            example="{'train:loss': 'loss ([0-9.]+)'}",
        ),
    ] = field(default_factory=lambda: dict(METRICS))
    tensorboard_output: Annotated[
        str | None,
        Help(
            "Place in S3 to which `tensorboard` in the output folder is copied while the job runs.",
            example="s3://my-bucket/tensorboard",
        ),
        sections.S3,
    ] = None
    remote_debug: Annotated[
        bool,
        Help("Let a shell into the containers, through AWS Systems Manager.", example="false"),
    ] = False
    profiler_interval: Annotated[
        int | None,
        Help(
            "Record CPU, GPU and disk use every so many milliseconds: 100, 200, 500, 1000, 5000 "
            "or 60000. Default: SageMaker's profiler is off.",
            example="1000",
        ),
    ] = None
    debugger: Annotated[
        bool, Help("Switch SageMaker Debugger's hook on; needs an image that has it.", "false")
    ] = False
    sender: Annotated[
        Literal["auto", "sdk", "boto3"],
        Help(
            "`sdk`: before sending, compare with what the SageMaker SDK would send. `boto3`: "
            "do not. `auto`: compare where the SDK is installed."
        ),
    ] = "auto"

    @property
    def owner(self) -> str:
        """Account that must own the buckets: the one that is named, else the role's."""
        return self.bucket_owner or self.role.split(":")[4]

    @property
    def source_is_a_channel(self) -> bool:
        """Whether the service itself fetches the source, before the container starts."""
        return self.network_isolation or bool(self.image_entrypoint)

    @property
    def training_type(self) -> str:
        """The type of the machines that train; empty where it cannot be told."""
        for group in self.instance_groups:
            if group.name == self.distribution_group:
                return group.instance_type
        return self.instance_type or ""

    @property
    def by_torchrun(self) -> bool:
        """Whether the container starts the ranks with torchrun, rather than with mpirun."""
        return self.distribution in {"torch_distributed", "smdistributed.modelparallel"}


def region(options: Options) -> str | None:
    """The region the job goes to: the job file's, else the environment's."""
    return (
        options.region
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or None
    )
