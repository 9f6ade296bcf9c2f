"""The `sagemaker:` section of the job file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from deploykit.fields import Bounds, Duration, Help, Pattern

Distribution = Literal["torch_distributed", "pytorchddp", "smdistributed", "none"]

ROLE = Pattern(
    r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[a-zA-Z0-9_+=,.@/-]+",
    "the full ARN of an execution role (aws iam get-role --role-name NAME --query Role.Arn)",
)
INSTANCE_TYPE = Pattern(r"ml\.[a-z0-9-]+\.[a-z0-9]+", "a type such as ml.g5.12xlarge")
BUCKET = Pattern(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "an S3 bucket's name, without s3://")
PREFIX = Pattern(
    r"[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*", "folders of the bucket, without a slash at either end"
)
REGION = Pattern(r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}", "a region such as us-east-1")
ID = Pattern(r"[0-9a-zA-Z-]{1,32}", "an id such as subnet-0a1b2c3d")
IMAGE = Pattern(r"[!-~]{1,255}", "an image such as ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG")
VERSION = Pattern(r"[0-9]+\.[0-9]+\.[0-9]+", "a full version such as 2.8.0")
PYTHON = Pattern(r"py3[0-9]{0,2}", "a Python version such as py312")
TAG = Pattern(r"[\w\s.:/=+@-]{0,256}", "letters, digits, blanks and _.:/=+-@, at most 256")


@dataclass(frozen=True)
class Options:
    """What only SageMaker needs to know. The instance count is `resources.nodes`."""

    role: Annotated[
        str,
        Help(
            "Execution role of the job, as a full ARN: a name would have to be looked up. "
            "`aws iam get-role --role-name NAME --query Role.Arn` prints it.",
            example="arn:aws:iam::123456789012:role/training",
        ),
        ROLE,
    ]
    instance_type: Annotated[
        str, Help("Type of each machine.", example="ml.g5.12xlarge"), INSTANCE_TYPE
    ]
    bucket: Annotated[
        str,
        Help(
            "S3 bucket, in the job's region, for the source and, without `output`, the results.",
            example="my-bucket",
        ),
        BUCKET,
    ]
    prefix: Annotated[str, Help("Folder in the bucket.", example="deploykit"), PREFIX] = "deploykit"
    region: Annotated[
        str | None,
        Help("Region of the job. Default: AWS_REGION, then AWS_DEFAULT_REGION.", "us-east-1"),
        REGION,
    ] = None
    framework_version: Annotated[
        str | None,
        Help("PyTorch of AWS's own image, 2.0.0 to 2.8.0; this or `image_uri`.", example="2.8.0"),
        VERSION,
    ] = None
    py_version: Annotated[
        str | None,
        Help("Python of AWS's own image. Default: the only one of that version.", example="py312"),
        PYTHON,
    ] = None
    image_uri: Annotated[
        str | None,
        Help("Container image instead of `framework_version`; needed for later PyTorch."),
        IMAGE,
    ] = None
    distribution: Annotated[
        Distribution,
        Help(
            "What starts the ranks: `torch_distributed` is torchrun. `pytorchddp` runs as "
            "`smdistributed` (data parallel): the SDK has rewritten it since 2.221.1."
        ),
    ] = "torch_distributed"
    volume_size: Annotated[
        int,
        Help("Disk of each machine in GB; types with NVMe disks ignore it.", example="30"),
        Bounds(1, 16384),
    ] = 30
    spot: Annotated[
        bool, Help("Managed spot training: cheaper, and may be interrupted.", example="false")
    ] = False
    max_wait: Annotated[
        Duration | None,
        Help("With `spot`: longest time from submit to end, at least `time_limit`.", example="2h"),
        Bounds(1),
    ] = None
    subnets: Annotated[
        tuple[Annotated[str, ID], ...], Help("Subnets of your VPC, with `security_group_ids`.")
    ] = ()
    security_group_ids: Annotated[
        tuple[Annotated[str, ID], ...],
        Help("Security groups; one must let its own members in on all ports."),
    ] = ()
    encrypt_inter_container_traffic: Annotated[
        bool, Help("Encrypt what the machines send each other; slower.", example="false")
    ] = False
    keep_alive: Annotated[
        Duration | None,
        Help("Keep the machines for the next job (warm pool), at most 1h; billed.", example="10m"),
        Bounds(1),
    ] = None
    tags: Annotated[
        Mapping[Annotated[str, TAG], Annotated[str, TAG]],
        Help("Tags of the job, for cost reports.", example="{team: vision}"),
    ] = field(default_factory=dict)
    sender: Annotated[
        Literal["auto", "sdk", "boto3"],
        Help(
            "`sdk`: before sending, compare with what the SageMaker SDK would send. `boto3`: "
            "do not. `auto`: compare where the SDK is installed."
        ),
    ] = "auto"


def region(options: Options) -> str | None:
    """The region the job goes to: the job file's, else the environment's."""
    return (
        options.region
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or None
    )
