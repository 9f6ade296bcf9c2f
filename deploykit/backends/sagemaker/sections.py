"""The patterns of the `sagemaker:` section, and the sections inside it.

Limits are those of CreateTrainingJob:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from deploykit.fields import Bounds, Help, Pattern

ROLE = Pattern(
    r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[a-zA-Z0-9_+=,.@/-]+",
    "the full ARN of an execution role (aws iam get-role --role-name NAME --query Role.Arn)",
)
INSTANCE_TYPE = Pattern(r"ml\.[a-z0-9-]+\.[a-z0-9]+", "a type such as ml.g5.12xlarge")
BUCKET = Pattern(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "an S3 bucket's name, without s3://")
ACCOUNT = Pattern(r"[0-9]{12}", "an account's 12 digits")
PREFIX = Pattern(
    r"[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*", "folders of the bucket, without a slash at either end"
)
REGION = Pattern(r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}", "a region such as us-east-1")
ID = Pattern(r"[0-9a-zA-Z-]{1,32}", "an id such as subnet-0a1b2c3d")
IMAGE = Pattern(r"[!-~]{1,255}", "an image such as ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG")
VERSION = Pattern(r"[0-9]+\.[0-9]+\.[0-9]+", "a full version such as 2.8.0")
PYTHON = Pattern(r"py3[0-9]{0,2}", "a Python version such as py312")
TAG = Pattern(r"[\w\s.:/=+@-]{0,256}", "letters, digits, blanks and _.:/=+-@, at most 256")
KEY = Pattern(r"[a-zA-Z0-9:/_-]{1,2048}", "a KMS key's id, ARN or alias")
S3 = Pattern(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\x00-\x1f\x7f]*)?", "a place such as s3://bucket/a"
)
GROUP = Pattern(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}", "letters, digits, hyphens and underscores")
FILE_SYSTEM = Pattern(r"fs-[0-9a-f]{8,18}", "an id such as fs-0123456789abcdef0")
DIRECTORY = Pattern(r"/[^\x00-\x1f\x7f]{0,4095}", "a full path such as /fsx/train")
LINE = Pattern(r"[ -~]{1,256}", "printable ASCII on one line, at most 256 characters")
METRIC = Pattern(r".{1,255}", "one line, at most 255 characters")
REGEX = Pattern(r".{1,500}", "a regular expression of at most 500 characters, on one line")
PLAN = Pattern(
    r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:[0-9]{12}:training-plan/[!-~]+", "a training plan's ARN"
)


@dataclass(frozen=True)
class InstanceGroup:
    """Machines of one type in a heterogeneous cluster."""

    name: Annotated[str, Help("Name of the group.", example="gpu"), GROUP]
    instance_type: Annotated[
        str, Help("Type of each of its machines.", example="ml.p4d.24xlarge"), INSTANCE_TYPE
    ]
    instance_count: Annotated[int, Help("Its machines.", example="2"), Bounds(1)]


@dataclass(frozen=True)
class Channel:
    """How one input channel is read.

    Sources and input modes: https://docs.aws.amazon.com/sagemaker/latest/dg/model-access-training-data.html
    """

    s3: Annotated[
        str | None, Help("Place in S3. Default: `data.NAME`.", "s3://my-bucket/train"), S3
    ] = None
    s3_data_type: Annotated[
        Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"],
        Help("What lies there: objects below a prefix, or one file that lists them."),
    ] = "S3Prefix"
    s3_distribution: Annotated[
        Literal["FullyReplicated", "ShardedByS3Key"],
        Help("Whether every machine gets all objects, or each its share of them."),
    ] = "FullyReplicated"
    input_mode: Annotated[
        Literal["File", "FastFile", "Pipe"],
        Help(
            "`File`: downloaded before the start. `FastFile`: files, read from S3 when they are "
            "opened. `Pipe`: a FIFO for each epoch, `DEPLOYKIT_DATA_<NAME>` with `_0`, `_1`, "
            "... after it."
        ),
    ] = "File"
    attribute_names: Annotated[
        tuple[Annotated[str, METRIC], ...],
        Help("Keys to read of each line of an augmented manifest, at most 16.", "[source-ref]"),
    ] = ()
    content_type: Annotated[
        str | None, Help("MIME type, for what reads it.", example="text/csv"), LINE
    ] = None
    compression: Annotated[
        Literal["None", "Gzip"], Help("`Gzip`: unpacked on the way; only in `Pipe` mode.")
    ] = "None"
    record_wrapping: Annotated[
        Literal["None", "RecordIO"], Help("`RecordIO`: wrap each object; only in `Pipe` mode.")
    ] = "None"
    shuffle_seed: Annotated[
        int | None, Help("Shuffle the objects, or an augmented manifest's lines, by this seed.")
    ] = None
    instance_groups: Annotated[
        tuple[Annotated[str, GROUP], ...],
        Help("Groups of a heterogeneous cluster that get the channel, at most 5. Default: all."),
    ] = ()
    file_system_id: Annotated[
        str | None,
        Help("A file system instead of S3; needs `subnets`.", example="fs-0123456789abcdef0"),
        FILE_SYSTEM,
    ] = None
    file_system_type: Annotated[Literal["FSxLustre", "EFS"], Help("Kind of the file system.")] = (
        "FSxLustre"
    )
    directory_path: Annotated[
        str | None,
        Help("Its folder; for FSx it begins with the mount name.", example="/fsx/train"),
        DIRECTORY,
    ] = None
    file_system_access: Annotated[Literal["ro", "rw"], Help("Read only, or read and write.")] = "ro"


@dataclass(frozen=True)
class ModelParallel:
    """Parameters of SageMaker's model parallel library, version 2; a key left out is not sent.

    https://docs.aws.amazon.com/sagemaker/latest/dg/distributed-model-parallel-v2-reference.html
    """

    hybrid_shard_degree: Annotated[
        int | None,
        Help("Ranks that share one copy of the weights; 0: as the script's FSDP says.", "8"),
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
    sm_activation_offloading: Annotated[
        bool | None, Help("Keep activations in the machine's memory.")
    ] = None
    activation_loading_horizon: Annotated[
        int | None, Help("Layers whose offloaded activations are fetched ahead."), Bounds(1)
    ] = None
    fsdp_cache_flush_warnings: Annotated[
        bool | None, Help("Warn of flushes of the memory cache.")
    ] = None
    allow_empty_shards: Annotated[bool | None, Help("Let a rank hold no part of a tensor.")] = None
    random_seed: Annotated[int | None, Help("Seed of the library's random numbers.")] = None

    def parameters(self) -> dict[str, int | bool]:
        """What was chosen, in the library's words."""
        return {name: value for name, value in vars(self).items() if value is not None}
