"""Patterns for values of the `sagemaker:` section, and its subsections.

Limits are those of CreateTrainingJob:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from deploykit.job.decode import Bounds, Help, Pattern

ROLE = Pattern(
    r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[a-zA-Z0-9_+=,.@/-]+",
    "the full ARN of an execution role (aws iam get-role --role-name NAME --query Role.Arn)",
)
INSTANCE_TYPE = Pattern(r"ml\.[a-z0-9-]+\.[a-z0-9]+", "a type such as ml.g5.12xlarge")
ACCOUNT = Pattern(r"[0-9]{12}", "an account ID of 12 digits")
PREFIX = Pattern(
    r"[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*", "folders, without a leading or trailing slash"
)
SUBNET = Pattern(r"subnet-[0-9a-zA-Z]{1,25}", "an ID such as subnet-0a1b2c3d")
SECURITY_GROUP = Pattern(r"sg-[0-9a-zA-Z]{1,29}", "an ID such as sg-0a1b2c3d")
IMAGE = Pattern(r"[!-~]{1,255}", "an image such as ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG")
VERSION = Pattern(r"[0-9]+\.[0-9]+\.[0-9]+", "a full version such as 2.8.0")
PYTHON = Pattern(r"py3[0-9]{0,2}", "a Python version such as py312")
TAG = Pattern(r"[\w\s.:/=+@-]{0,256}", "letters, digits, blanks and _.:/=+-@, at most 256")
KEY = Pattern(r"[a-zA-Z0-9:/_-]{1,2048}", "the ID, ARN or alias of a KMS key")
S3 = Pattern(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\x00-\x1f\x7f]*)?",
    "an S3 location such as s3://bucket/a",
)
GROUP = Pattern(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}", "letters, digits, hyphens and underscores")
FILE_SYSTEM = Pattern(r"fs-[0-9a-f]{8,18}", "an ID such as fs-0123456789abcdef0")
DIRECTORY = Pattern(r"/[^\x00-\x1f\x7f]{0,4095}", "an absolute path such as /fsx/train")
LINE = Pattern(r"[ -~]{1,256}", "printable ASCII on one line, at most 256 characters")
METRIC = Pattern(r".{1,255}", "one line, at most 255 characters")
REGEX = Pattern(r".{1,500}", "a regular expression of at most 500 characters, on one line")
PLAN = Pattern(
    r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:[0-9]{12}:training-plan/[!-~]+", "a training plan's ARN"
)


_JAVAS = re.compile(r"\(\?<(?=\w)|\\p\{")
"""What Java's regular expressions have, and Python's do not: nothing is known of such a pattern."""


def has_group(pattern: str) -> bool:
    """Whether a pattern compiles and has a group, from which SageMaker takes the value."""
    if _JAVAS.search(pattern):
        return True
    try:
        return re.compile(pattern).groups > 0
    except (re.error, OverflowError, RecursionError):
        return False


@dataclass(frozen=True)
class InstanceGroup:
    """Instances of one type in a heterogeneous cluster."""

    name: Annotated[str, Help("Name of the group.", example="gpu"), GROUP]
    instance_type: Annotated[
        str, Help("Type of its instances.", example="ml.p4d.24xlarge"), INSTANCE_TYPE
    ]
    instance_count: Annotated[int, Help("Number of instances.", example="2"), Bounds(1)]


@dataclass(frozen=True)
class Channel:
    """How an input channel is read.

    Sources and input modes: https://docs.aws.amazon.com/sagemaker/latest/dg/model-access-training-data.html
    """

    s3: Annotated[
        str | None, Help("S3 location. Default: `data.NAME`.", "s3://my-bucket/train"), S3
    ] = None
    s3_data_type: Annotated[
        Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"],
        Help("What `s3` names: a prefix of objects, or one file that lists objects."),
    ] = "S3Prefix"
    s3_distribution: Annotated[
        Literal["FullyReplicated", "ShardedByS3Key"],
        Help("Whether every node gets all objects, or each node a share of them."),
    ] = "FullyReplicated"
    input_mode: Annotated[
        Literal["File", "FastFile", "Pipe"],
        Help(
            "`File`: downloaded before the program starts. `FastFile`: streamed from S3 when "
            "opened. `Pipe`: one FIFO per epoch, `DEPLOYKIT_DATA_<NAME>` followed by `_0`, `_1`, "
            "..."
        ),
    ] = "File"
    attribute_names: Annotated[
        tuple[Annotated[str, METRIC], ...],
        Help("Keys to read from each line of an augmented manifest, at most 16.", "[source-ref]"),
    ] = ()
    content_type: Annotated[
        str | None, Help("MIME type of the data.", example="text/csv"), LINE
    ] = None
    compression: Annotated[
        Literal["None", "Gzip"], Help("`Gzip`: decompress the data; `Pipe` mode only.")
    ] = "None"
    record_wrapping: Annotated[
        Literal["None", "RecordIO"],
        Help("`RecordIO`: wrap each object in a record; `Pipe` mode only."),
    ] = "None"
    shuffle_seed: Annotated[
        int | None,
        Help("Seed for shuffling the objects, or the lines of an augmented manifest."),
    ] = None
    instance_groups: Annotated[
        tuple[Annotated[str, GROUP], ...],
        Help("Instance groups that receive the channel, at most 5. Default: all."),
    ] = ()
    file_system_id: Annotated[
        str | None,
        Help("File system, instead of S3; requires `subnets`.", example="fs-0123456789abcdef0"),
        FILE_SYSTEM,
    ] = None
    file_system_type: Annotated[Literal["FSxLustre", "EFS"], Help("Type of the file system.")] = (
        "FSxLustre"
    )
    directory_path: Annotated[
        str | None,
        Help(
            "Directory in the file system; for FSx, it begins with the mount name.",
            example="/fsx/train",
        ),
        DIRECTORY,
    ] = None
    file_system_access: Annotated[Literal["ro", "rw"], Help("Read-only, or read and write.")] = "ro"


@dataclass(frozen=True)
class ModelParallel:
    """Parameters of SageMaker's model parallel library, version 2. Omitted keys are not sent.

    https://docs.aws.amazon.com/sagemaker/latest/dg/distributed-model-parallel-v2-reference.html
    """

    hybrid_shard_degree: Annotated[
        int | None,
        Help("Ranks that shard one copy of the weights; 0: as the script configures FSDP.", "8"),
        Bounds(0),
    ] = None
    tensor_parallel_degree: Annotated[
        int | None, Help("Ranks that split each layer."), Bounds(1)
    ] = None
    context_parallel_degree: Annotated[
        int | None, Help("Ranks that split each sequence."), Bounds(1)
    ] = None
    expert_parallel_degree: Annotated[
        int | None, Help("Ranks that split the experts of a layer."), Bounds(1)
    ] = None
    sm_activation_offloading: Annotated[bool | None, Help("Offload activations to CPU memory.")] = (
        None
    )
    activation_loading_horizon: Annotated[
        int | None, Help("Layers whose offloaded activations are prefetched."), Bounds(1)
    ] = None
    fsdp_cache_flush_warnings: Annotated[
        bool | None, Help("Warn when the memory cache is flushed.")
    ] = None
    allow_empty_shards: Annotated[
        bool | None, Help("Allow a rank to hold no part of a tensor.")
    ] = None
    random_seed: Annotated[int | None, Help("Random seed of the library.")] = None

    def parameters(self) -> dict[str, int | bool]:
        """The parameters that are set, by the library's names."""
        return {name: value for name, value in vars(self).items() if value is not None}
