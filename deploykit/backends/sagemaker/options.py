"""The `sagemaker:` section of the job file, and what follows from it and from `data`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from deploykit.backends.sagemaker import aws, catalog
from deploykit.doctor.requirements import BUCKET, REGION
from deploykit.job.decode import Bounds, Duration, Help, Pattern, Usual
from deploykit.job.model import CHANNEL, VARIABLE, JobSpec
from deploykit.lib import paths

ROLE = Pattern(
    r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[a-zA-Z0-9_+=,.@/-]+",
    "the full ARN of an IAM role (aws iam get-role --role-name NAME --query Role.Arn)",
)
INSTANCE_TYPE = Pattern(r"ml\.[a-z0-9-]+\.[a-z0-9]+", "an instance type such as ml.g5.12xlarge")
ACCOUNT = Pattern(r"[0-9]{12}", "a 12-digit account ID")
PREFIX = Pattern(
    r"[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*", "a folder path without a leading or trailing slash"
)
SUBNET = Pattern(r"subnet-[0-9a-zA-Z]{1,25}", "an ID such as subnet-0a1b2c3d")
SECURITY_GROUP = Pattern(r"sg-[0-9a-zA-Z]{1,29}", "an ID such as sg-0a1b2c3d")
IMAGE = Pattern(r"[!-~]{1,255}", "an image such as ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG")
VERSION = Pattern(r"[0-9]+\.[0-9]+\.[0-9]+", "a full version such as 2.8.0")
PYTHON = Pattern(r"py3[0-9]{0,2}", "a Python version such as py312")
TAG = Pattern(r"[\w\s.:/=+@-]{0,256}", "at most 256 letters, digits, spaces and _.:/=+-@")
PROFILE = Pattern(r"[\w.@+ -]{1,128}", "the name of a profile in ~/.aws/config")
KEY = Pattern(r"[a-zA-Z0-9:/_-]{1,2048}", "the ID, ARN or alias of a KMS key")
S3 = Pattern(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\x00-\x1f\x7f]*)?",
    "an S3 location such as s3://bucket/a",
)
GROUP = Pattern(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}", "letters, digits, hyphens and underscores")
FILE_SYSTEM = Pattern(r"fs-[0-9a-f]{8,18}", "an ID such as fs-0123456789abcdef0")
DIRECTORY = Pattern(r"/[^\x00-\x1f\x7f]{0,4095}", "an absolute path such as /fsx/train")
LINE = Pattern(r"[ -~]{1,256}", "one line of at most 256 printable ASCII characters")
METRIC = Pattern(r".{1,255}", "one line of at most 255 characters")
REGEX = Pattern(r".{1,500}", "a one-line regular expression of at most 500 characters")
ENDPOINT = Pattern(
    r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}",
    "at most 63 letters, digits and hyphens, without a hyphen at either end",
)
_MIN_KEPT, _MAX_KEPT = 600, 366 * 86400
"""Seconds: an endpoint takes minutes to start, and a schedule may be a year ahead."""
TOPIC = Pattern(r"arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[!-~]+", "the ARN of an SNS topic")
PLAN = Pattern(
    r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:[0-9]{12}:training-plan/[!-~]+",
    "the ARN of a training plan",
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
        str, Help("Instance type of the group.", example="ml.p4d.24xlarge"), INSTANCE_TYPE
    ]
    instance_count: Annotated[
        int, Help("Number of instances in the group.", example="2"), Bounds(1)
    ]


@dataclass(frozen=True)
class InstancePreference:
    """One of several acceptable instance types."""

    instance_type: Annotated[
        str, Help("Instance type of all nodes.", example="ml.p5.48xlarge"), INSTANCE_TYPE
    ]
    training_plan: Annotated[
        str | None,
        Help("ARN of a training plan for this type. Default: on-demand instances."),
        PLAN,
    ] = None


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
        Help("What `s3` points to: an object prefix, or a file that lists objects."),
    ] = "S3Prefix"
    s3_distribution: Annotated[
        Literal["FullyReplicated", "ShardedByS3Key"],
        Help("Copy all objects to every node, or a different share to each node."),
    ] = "FullyReplicated"
    input_mode: Annotated[
        Literal["File", "FastFile", "Pipe"],
        Help(
            "`File`: downloaded before the program starts. `FastFile`: streamed from S3 when "
            "opened. `Pipe`: one FIFO per epoch, at the path in `DEPLOYKIT_DATA_<NAME>` followed "
            "by `_0`, `_1`, ..."
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
        Help(
            "File system to read instead of S3; requires `subnets`.", example="fs-0123456789abcdef0"
        ),
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
    file_system_access: Annotated[Literal["ro", "rw"], Help("Read-only, or read-write.")] = "ro"


@dataclass(frozen=True)
class ModelParallel:
    """Parameters of SageMaker's model parallel library, version 2. Omitted keys are not sent.

    https://docs.aws.amazon.com/sagemaker/latest/dg/distributed-model-parallel-v2-reference.html
    """

    hybrid_shard_degree: Annotated[
        int | None,
        Help(
            "Number of ranks that shard one copy of the weights; 0 keeps the script's setting.",
            "8",
        ),
        Bounds(0),
    ] = None
    tensor_parallel_degree: Annotated[
        int | None, Help("Number of ranks that split each layer."), Bounds(1)
    ] = None
    context_parallel_degree: Annotated[
        int | None, Help("Number of ranks that split each sequence."), Bounds(1)
    ] = None
    expert_parallel_degree: Annotated[
        int | None, Help("Number of ranks that split the experts of a layer."), Bounds(1)
    ] = None
    sm_activation_offloading: Annotated[bool | None, Help("Offload activations to CPU memory.")] = (
        None
    )
    activation_loading_horizon: Annotated[
        int | None, Help("Number of layers whose offloaded activations are prefetched."), Bounds(1)
    ] = None
    fsdp_cache_flush_warnings: Annotated[
        bool | None, Help("Warn when the memory cache is flushed.")
    ] = None
    allow_empty_shards: Annotated[
        bool | None, Help("Allow a rank to hold no part of a tensor.")
    ] = None
    random_seed: Annotated[int | None, Help("Random seed for the library.")] = None

    def parameters(self) -> dict[str, int | bool]:
        return {name: value for name, value in vars(self).items() if value is not None}


Distribution = Literal[
    "torch_distributed",
    "pytorchddp",
    "smdistributed.dataparallel",
    "smdistributed.modelparallel",
    "mpi",
    "none",
]

DATA_PARALLEL = ("pytorchddp", "smdistributed.dataparallel")
"""Distributions that use SageMaker's data parallel library: the SDK turns the first into the
second."""
MPIRUN = (*DATA_PARALLEL, "mpi")
"""Distributions under which mpirun starts the ranks. Only these keep the name of the instance group
that trains."""

METRICS = {
    "validation:loss": r"epoch \d+: validation loss ([0-9.]+)",
    "validation:accuracy": r"epoch \d+: validation loss [0-9.]+, accuracy ([0-9.]+)",
    "test:accuracy": r"test accuracy ([0-9.]+)",
}
"""Metric -> regular expression, for the lines that `entrypoints/train.py` prints: `metrics:
deploykit`."""


@dataclass(frozen=True)
class Autoscaling:
    """How the number of instances follows the load."""

    max: Annotated[int, Help("Maximum number of instances.", example="4"), Bounds(1)]
    target: Annotated[
        int,
        Help(
            "Target load per instance: requests per minute or, with `async`, waiting requests.",
            example="600",
        ),
        Bounds(1),
    ]
    min: Annotated[int, Help("Minimum number of instances; 0 only with `async`."), Bounds(0)] = 1
    scale_in_cooldown: Annotated[
        Duration | None,
        Help("Minimum time between removals of instances. Default: 5m.", example="10m"),
    ] = None
    scale_out_cooldown: Annotated[
        Duration | None,
        Help("Minimum time between additions of instances. Default: 5m.", example="1m"),
    ] = None


@dataclass(frozen=True)
class Serverless:
    """An endpoint on CPUs without dedicated instances, billed per use.

    https://docs.aws.amazon.com/sagemaker/latest/dg/serverless-endpoints.html
    """

    memory: Annotated[int, Help("Memory in GB, 1 to 6.", example="4"), Bounds(1, 6, "GB")] = 2
    max_concurrency: Annotated[
        int,
        Help("Maximum number of concurrent requests; further requests are refused."),
        Bounds(1, 200),
    ] = 5
    provisioned_concurrency: Annotated[
        int | None,
        Help(
            "Number of concurrent requests for which the model stays loaded; billed continuously."
        ),
        Bounds(1, 200),
    ] = None


@dataclass(frozen=True)
class Asynchronous:
    """An endpoint that queues requests, reads them from S3 and writes the answers to S3."""

    output: Annotated[
        str | None,
        Help("S3 prefix for the answers. Default: a folder in `bucket`.", "s3://my-bucket/answers"),
        S3,
    ] = None
    failures: Annotated[
        str | None, Help("S3 prefix for the errors.", example="s3://my-bucket/failures"), S3
    ] = None
    success_topic: Annotated[str | None, Help("SNS topic notified of each answer."), TOPIC] = None
    error_topic: Annotated[str | None, Help("SNS topic notified of each error."), TOPIC] = None
    max_concurrency: Annotated[
        int | None,
        Help("Concurrent requests per instance. Default: SageMaker decides."),
        Bounds(1, 1000),
    ] = None


@dataclass(frozen=True)
class Batch:
    """A batch transform job, which answers all requests under an S3 prefix and then ends."""

    input: Annotated[str, Help("S3 prefix of the requests.", "s3://my-bucket/requests"), S3]
    output: Annotated[
        str | None,
        Help("S3 prefix for the answers. Default: a folder in `bucket`.", "s3://my-bucket/answers"),
        S3,
    ] = None
    input_type: Annotated[
        Literal["S3Prefix", "ManifestFile"],
        Help("What `input` points to: an object prefix, or a file that lists objects."),
    ] = "S3Prefix"
    content_type: Annotated[str, Help("MIME type of the requests."), LINE] = "application/json"
    accept: Annotated[str | None, Help("MIME type of the answers."), LINE] = None
    split: Annotated[
        Literal["None", "Line", "RecordIO", "TFRecord"],
        Help("How objects are split into records. `None`: each object is one request."),
    ] = "None"
    strategy: Annotated[
        Literal["MultiRecord", "SingleRecord"] | None,
        Help("With `split`: as many records per request as fit, or one."),
    ] = None
    max_payload: Annotated[
        int | None, Help("Maximum request size in MB. Default: 6."), Bounds(0, 100, "MB")
    ] = None
    max_concurrency: Annotated[int | None, Help("Concurrent requests per instance."), Bounds(1)] = (
        None
    )
    assemble: Annotated[Literal["None", "Line"], Help("`Line`: one answer per line of output.")] = (
        "None"
    )
    compression: Annotated[Literal["None", "Gzip"], Help("Compression of the input objects.")] = (
        "None"
    )


@dataclass(frozen=True)
class Capture:
    """Copies of requests and answers in S3."""

    percent: Annotated[int, Help("Percentage of requests to copy.", example="10"), Bounds(1, 100)]
    to: Annotated[
        str | None,
        Help("S3 prefix for the copies. Default: a folder in `bucket`.", "s3://my-bucket/captured"),
        S3,
    ] = None
    what: Annotated[
        Literal["both", "input", "output"], Help("Copy requests, answers, or both.")
    ] = "both"


@dataclass(frozen=True)
class Variant:
    """Another model behind the same endpoint, such as the previous one during a canary test."""

    name: Annotated[str, Help("Name of the variant.", example="stable"), ENDPOINT]
    model: Annotated[
        str,
        Help(
            "Name of a model in SageMaker; `deploykit endpoint status` prints the name for each "
            "deployment.",
            example="digits-0a1b2c3d4e",
        ),
        ENDPOINT,
    ]
    weight: Annotated[
        int, Help("Share of the requests, relative to the other variants."), Bounds(0)
    ] = 1
    instance_type: Annotated[
        str | None, Help("Instance type. Default: that of the endpoint."), INSTANCE_TYPE
    ] = None
    instance_count: Annotated[int, Help("Number of instances."), Bounds(1)] = 1
    shadow: Annotated[
        bool, Help("Send copies of the requests to this variant and discard its answers.")
    ] = False


@dataclass(frozen=True)
class Deploy:
    """How `deploykit deploy` serves a model: real-time, serverless, asynchronous or in batches.

    The role, bucket, VPC, tags, network isolation and credentials are set in `sagemaker`.
    """

    name: Annotated[
        str | None,
        Help("Name of the endpoint or transform job. Default: the job's name.", "digits"),
        ENDPOINT,
    ] = None
    instance_type: Annotated[
        str | None,
        Help("Instance type; required unless `serverless`.", example="ml.g5.xlarge"),
        INSTANCE_TYPE,
    ] = None
    instance_count: Annotated[int, Help("Initial number of instances."), Bounds(1)] = 1
    framework_version: Annotated[
        str | None,
        Help(
            "PyTorch version of AWS's inference image, 2.0.0 to 2.6.0. Default: the version that "
            "the package was built with.",
            example="2.6.0",
        ),
        VERSION,
    ] = None
    image_uri: Annotated[
        str | None, Help("Container image, instead of `framework_version`."), IMAGE
    ] = None
    env: Annotated[
        Mapping[Annotated[str, VARIABLE], str], Help("Environment variables of the container.")
    ] = field(default_factory=dict)
    serverless: Annotated[
        Serverless | None,
        Help("Serve without dedicated instances, billed per use.", example="{memory: 4}"),
    ] = None
    async_: Annotated[
        Asynchronous | None,
        Help("Queue requests in S3 and write answers to S3.", example="{max_concurrency: 4}"),
    ] = None
    batch: Annotated[
        Batch | None,
        Help("Run a transform job instead of an endpoint.", "{input: s3://my-bucket/requests}"),
    ] = None
    autoscaling: Annotated[
        Autoscaling | None,
        Help(
            "Scale the number of instances with the load. Default: a fixed number.",
            example="{max: 4, target: 600}",
        ),
    ] = None
    capture: Annotated[
        Capture | None, Help("Keep copies of requests and answers.", example="{percent: 10}")
    ] = None
    variant: Annotated[str, Help("Name of the deployed model's variant."), ENDPOINT] = "AllTraffic"
    weight: Annotated[
        int, Help("The model's share of the requests, relative to `variants`."), Bounds(0)
    ] = 1
    shadow: Annotated[
        bool, Help("Send the model copies of the requests to `variants` and discard its answers.")
    ] = False
    variants: Annotated[
        tuple[Variant, ...],
        Help(
            "Other models behind the endpoint, such as the previous one in a canary or shadow test."
        ),
    ] = ()
    delete_after: Annotated[
        Duration | None,
        Help(
            "Delete the endpoint this long after the last `deploykit deploy`, using a schedule "
            "in AWS that does not depend on this machine. Requires `scheduler_role`.",
            example="8h",
        ),
        Bounds(_MIN_KEPT, _MAX_KEPT),
    ] = None
    scheduler_role: Annotated[
        str | None,
        Help(
            "ARN of the role that EventBridge Scheduler uses to delete the endpoint; `deploykit "
            "infra` creates one.",
            example="arn:aws:iam::123456789012:role/training-scheduler",
        ),
        ROLE,
    ] = None
    startup_timeout: Annotated[
        Duration | None,
        Help("Time limit for the container to load the model: 60s to 1h.", example="10m"),
        Bounds(60, 3600),
    ] = None
    volume_size: Annotated[
        int | None, Help("Disk size of each instance in GB."), Bounds(1, 512, "GB")
    ] = None
    volume_kms_key: Annotated[
        str | None, Help("KMS key for the disks; not supported on types with NVMe disks."), KEY
    ] = None
    request: Annotated[
        Mapping[str, Any],
        Help(
            "Additional fields for the requests, by operation: CreateModel, "
            "CreateEndpointConfig, CreateEndpoint, UpdateEndpoint, CreateTransformJob; or "
            "ProductionVariant. Fields that deploykit sets from other keys are refused.",
            example="{ProductionVariant: {ModelDataDownloadTimeoutInSeconds: 600}}",
        ),
    ] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        """How the model is served, in a word."""
        chosen = {"serverless": self.serverless, "asynchronous": self.async_, "batch": self.batch}
        return next((name for name, part in chosen.items() if part is not None), "real-time")


@dataclass(frozen=True)
class Options:
    """Settings specific to SageMaker. `resources.nodes` sets the number of instances.

    Limits: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
    """

    role: Annotated[
        str,
        Help(
            "Execution role of the job, as a full ARN. "
            "`aws iam get-role --role-name NAME --query Role.Arn` prints it.",
            example="arn:aws:iam::123456789012:role/training",
        ),
        ROLE,
    ]
    bucket: Annotated[
        str,
        Help(
            "S3 bucket in the job's region for the source, and for the results if `output` is not "
            "set.",
            example="my-bucket",
        ),
        BUCKET,
    ]
    instance_type: Annotated[
        str | None,
        Help(
            "Instance type of each node; set this, `instance_preferences` or `instance_groups`.",
            example="ml.g5.12xlarge",
        ),
        INSTANCE_TYPE,
    ] = None
    instance_preferences: Annotated[
        tuple[InstancePreference, ...],
        Help(
            "Up to 5 instance types in order of preference: all nodes use the first type that is "
            "available. Not supported with spot, SMDDP or `smdistributed.modelparallel`.",
            example="[{instance_type: ml.p5.48xlarge}, {instance_type: ml.p4d.24xlarge}]",
        ),
    ] = ()
    instance_groups: Annotated[
        tuple[InstanceGroup, ...],
        Help("A heterogeneous cluster of at most 5 groups; only for `mpi` and SMDDP."),
    ] = ()
    distribution_group: Annotated[
        str | None,
        Help(
            "The group in `instance_groups` that trains. `resources` describes its nodes; nodes in "
            "other groups run the program without ranks.",
            example="gpu",
        ),
        GROUP,
    ] = None
    bucket_owner: Annotated[
        str | None,
        Help(
            "Account that must own the bucket; S3 refuses requests to a bucket in any other "
            "account. Default: the account in `role`.",
            example='"123456789012"',
        ),
        ACCOUNT,
    ] = None
    kms_key: Annotated[
        str | None,
        Help(
            "KMS key that encrypts the uploaded source and data in S3; the role needs "
            "`kms:Decrypt`. Default: the bucket's own encryption."
        ),
        KEY,
    ] = None
    prefix: Annotated[
        str,
        Help("Folder in the bucket in which deploykit stores files.", example="deploykit"),
        PREFIX,
    ] = "deploykit"
    region: Annotated[
        str | None,
        Help("Region of the job. Default: AWS_REGION, then AWS_DEFAULT_REGION.", "us-east-1"),
        REGION,
    ] = None
    profile: Annotated[
        str | None,
        Help(
            "Profile in `~/.aws/config` for sending the job and for fetching its status, logs and "
            "files. Default: the credentials from the environment, such as AWS_PROFILE.",
            example="research",
        ),
        PROFILE,
    ] = None
    assume_role: Annotated[
        str | None,
        Help(
            "ARN of a role to assume when sending and querying the job. The execution role is "
            "`role`.",
            example="arn:aws:iam::123456789012:role/submitter",
        ),
        ROLE,
    ] = None
    framework_version: Annotated[
        str | None,
        Help("PyTorch version of AWS's image, 2.0.0 to 2.8.0; set this or `image_uri`.", "2.8.0"),
        VERSION,
    ] = None
    py_version: Annotated[
        str | None,
        Help("Python version of AWS's image. Default: the only one available.", example="py312"),
        PYTHON,
    ] = None
    image_uri: Annotated[
        str | None,
        Help(
            "Container image, instead of `framework_version`; required for PyTorch 2.9 and later.",
            example=catalog.NEWEST_IMAGE,
        ),
        IMAGE,
    ] = None
    image_entrypoint: Annotated[
        tuple[Annotated[str, LINE], ...],
        Help(
            "The image's own ENTRYPOINT, as `docker inspect` shows it. If set, each container "
            "verifies the hash of the source before it starts anything.",
            example="[bash, -m, start_with_right_hostname.sh]",
        ),
    ] = ()
    distribution: Annotated[
        Distribution,
        Help(
            "Launcher for the ranks: `torch_distributed` uses torchrun, `mpi` uses mpirun. "
            "`pytorchddp` runs as `smdistributed.dataparallel` (SMDDP), as in the SDK since "
            "2.221.1."
        ),
        Usual(
            "torch_distributed starts the ranks with torchrun, including for DDP", ("pytorchddp",)
        ),
    ] = "torch_distributed"
    mpi_options: Annotated[
        str | None,
        Help(
            "Additional options for mpirun, separated by spaces; for `mpi`, `pytorchddp` and "
            "`smdistributed.dataparallel`.",
            example='"-x NCCL_ALGO=Ring --verbose"',
        ),
        LINE,
    ] = None
    model_parallel: Annotated[
        ModelParallel | None, Help("Parameters of `smdistributed.modelparallel`.")
    ] = None
    volume_size: Annotated[
        int,
        Help(
            "Disk size of each node in GB; ignored on instance types with NVMe disks.", example="30"
        ),
        Bounds(1, 16384, "GB"),
    ] = 30
    volume_kms_key: Annotated[
        str | None,
        Help("KMS key for the disks; not supported on instance types with NVMe disks."),
        KEY,
    ] = None
    channels: Annotated[
        Mapping[Annotated[str, CHANNEL], Channel],
        Help("How to read the channels in `data`, by name; can also define additional channels."),
    ] = field(default_factory=dict)
    output_kms_key: Annotated[str | None, Help("KMS key for the results in S3."), KEY] = None
    output_compression: Annotated[
        Literal["gzip", "none"],
        Help("`none` uploads results as individual files, which is faster for large models."),
    ] = "gzip"
    spot: Annotated[
        bool,
        Help(
            "Use managed spot training, which is cheaper but can be interrupted.", example="false"
        ),
    ] = False
    max_wait: Annotated[
        Duration | None,
        Help(
            "With `spot`: maximum time from submission to the end, at least `time_limit`.",
            example="2h",
        ),
        Bounds(1),
    ] = None
    max_pending: Annotated[
        Duration | None,
        Help(
            "Stop the job if it has waited this long for GPU or Trainium instances: 30m to 28d.",
            example="2h",
        ),
        Bounds(1),
    ] = None
    keep_alive: Annotated[
        Duration | None,
        Help(
            "Keep the nodes in a billed warm pool for the next job, for at most 1h.", example="10m"
        ),
        Bounds(1),
    ] = None
    training_plan: Annotated[
        str | None, Help("ARN of a training plan whose reserved instances run the job."), PLAN
    ] = None
    subnets: Annotated[
        tuple[Annotated[str, SUBNET], ...],
        Help("Subnets of your VPC, at most 16, with `security_group_ids`."),
    ] = ()
    security_group_ids: Annotated[
        tuple[Annotated[str, SECURITY_GROUP], ...],
        Help("Security groups, at most 5; one must allow all traffic between its members."),
    ] = ()
    encrypt_inter_container_traffic: Annotated[
        bool, Help("Encrypt the traffic between nodes, which slows communication.", example="false")
    ] = False
    network_isolation: Annotated[
        bool,
        Help(
            "Isolate the containers from all networks except their own. The source is then "
            "provided as a channel, and secrets cannot be looked up.",
            example="false",
        ),
    ] = False
    tags: Annotated[
        Mapping[Annotated[str, TAG], Annotated[str, TAG]],
        Help("Up to 50 tags for the job, for example for cost reports.", example="{team: vision}"),
    ] = field(default_factory=dict)
    metric_definitions: Annotated[
        Mapping[Annotated[str, METRIC], Annotated[str, REGEX]],
        Help(
            "Metrics for SageMaker to extract from the log: each name maps to a regular "
            "expression with one group; at most 40, including those from `metrics`.",
            example="{'train:loss': 'loss ([0-9.]+)'}",
        ),
    ] = field(default_factory=dict)
    metrics: Annotated[
        Literal["none", "deploykit"],
        Help("`deploykit` also extracts the metrics that deploykit's own trainer prints."),
    ] = "none"
    metrics_time_series: Annotated[
        bool | None,
        Help(
            "Keep the history of each metric, for charts in SageMaker. Default: on with "
            "`framework_version`, as in the SDK."
        ),
    ] = None
    tensorboard_output: Annotated[
        str | None,
        Help(
            "S3 prefix to which `tensorboard` in the output folder is copied while the job runs.",
            example="s3://my-bucket/tensorboard",
        ),
        S3,
    ] = None
    remote_debug: Annotated[
        bool,
        Help("Allow shell access to the containers through AWS Systems Manager.", example="false"),
    ] = False
    infra_check: Annotated[
        bool,
        Help("Check the health of the instances before the job starts.", example="false"),
    ] = False
    profiler_interval: Annotated[
        int | None,
        Help(
            "Interval in milliseconds at which SageMaker's profiler records CPU, GPU and disk use: "
            "100, 200, 500, 1000, 5000 or 60000. Default: the profiler is off.",
            example="1000",
        ),
    ] = None
    debugger: Annotated[
        bool, Help("Enable SageMaker Debugger's hook; requires an image with smdebug.", "false")
    ] = False
    request: Annotated[
        Mapping[str, Any],
        Help(
            "Additional fields for the CreateTrainingJob request, by their API names. Fields "
            "that deploykit sets from other keys are refused.",
            example="{ExperimentConfig: {ExperimentName: vision}}",
        ),
    ] = field(default_factory=dict)
    deploy: Annotated[
        Deploy | None,
        Help("How `deploykit deploy` serves the model.", example="{instance_type: ml.g5.xlarge}"),
    ] = None
    sender: Annotated[
        Literal["boto3", "sdk"],
        Help(
            "`boto3` sends the request that the dry run shows. `sdk` builds and sends it with your "
            "installed SageMaker SDK 2.x; both requests must be identical."
        ),
    ] = "boto3"

    @property
    def beyond_sdk(self) -> list[str]:
        """Keys that are set and for which the SageMaker SDK has no argument."""
        return [
            name
            for name in ("instance_preferences", "max_pending", "request")
            if getattr(self, name)
        ]

    @property
    def owner(self) -> str:
        """Account that must own the buckets: `bucket_owner`, else the account of the role."""
        return self.bucket_owner or self.role.split(":")[4]

    @property
    def credentials(self) -> aws.Credentials:
        """Those that send the job, and ask about it."""
        return aws.Credentials(self.profile, self.assume_role)

    @property
    def source_is_a_channel(self) -> bool:
        """Whether the service downloads the source before the container starts."""
        return self.network_isolation or bool(self.image_entrypoint)

    @property
    def training_type(self) -> str:
        """Instance type of the nodes that train, by preference; empty if it is not determined."""
        for group in self.instance_groups:
            if group.name == self.distribution_group:
                return group.instance_type
        for preference in self.instance_preferences[:1]:
            return preference.instance_type
        return self.instance_type or ""

    @property
    def quota(self) -> str:
        """The name of the quota that limits the instances of the job, in Service Quotas."""
        return f"{self.training_type} for {'spot ' * self.spot}training job usage"

    @property
    def image_type(self) -> str:
        """Instance type that decides on the image: the first one with GPUs, as in the SDK."""
        if self.instance_type is not None:
            return self.instance_type
        types = [one.instance_type for one in self.instance_preferences or self.instance_groups]
        return next(filter(catalog.has_gpu, types), types[0])

    @property
    def by_torchrun(self) -> bool:
        return self.distribution in {"torch_distributed", "smdistributed.modelparallel"}

    def code(self, bundle: str) -> str:
        """S3 location of the source, named by its hash so that it is uploaded only once."""
        return f"s3://{self.bucket}/{self.code_key(bundle)}"

    def code_key(self, bundle: str) -> str:
        return f"{self.prefix}/bundles/{bundle}/sourcedir.tar.gz"

    def data_location(self, digest: str) -> str:
        """S3 prefix of the files of an uploaded folder, named by its hash."""
        return f"s3://{self.bucket}/{self.prefix}/data/{digest}/"

    def manifest_key(self, digest: str) -> str:
        """The object that is written when all files of a folder are uploaded."""
        return f"{self.prefix}/data-manifests/{digest}.json"

    def channel(self, name: str) -> Channel:
        return self.channels.get(name, Channel())


def launched(job: JobSpec, options: Options) -> Options:
    """The options with `none` in place of torchrun for `launcher: python`: one process a node."""
    plain = job.entrypoint.launcher == "python" and options.distribution == "torch_distributed"
    return replace(options, distribution="none") if plain else options


def preferred(options: Options) -> list[Options]:
    """The options with each of `instance_preferences` alone; without any, the options."""
    return [
        replace(
            options,
            instance_preferences=(),
            instance_type=one.instance_type,
            training_plan=one.training_plan or options.training_plan,
        )
        for one in options.instance_preferences
    ] or [options]


def machines(job: JobSpec, options: Options) -> list[tuple[int, str]]:
    if options.instance_groups:
        return [(group.instance_count, group.instance_type) for group in options.instance_groups]
    return [(job.resources.nodes, options.training_type)]


def region(options: Options) -> str | None:
    """Region of the job: `region`, else AWS_REGION, else AWS_DEFAULT_REGION, else None."""
    return options.region or environment_region()


def environment_region() -> str | None:
    """Region of the environment: AWS_REGION, else AWS_DEFAULT_REGION, else None."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None


def bills(_: Options) -> bool:
    return True


def channel_names(job: JobSpec, options: Options) -> list[str]:
    """All input channels: those of `data`, then those of `channels` alone."""
    return [*job.data, *(name for name in options.channels if name not in job.data)]


def channel_location(job: JobSpec, options: Options, name: str) -> str | None:
    """The S3 location of a channel; None if the job file names none."""
    own = job.data.get(name)
    return options.channel(name).s3 or (own.path if own else None)


def local_data(job: JobSpec, options: Options) -> dict[str, str]:
    """The channels of `data` that are folders or files of this machine, which are uploaded."""
    return {
        name: own.path
        for name, own in job.data.items()
        if not paths.is_address(own.path)
        and options.channel(name).s3 is None
        and options.channel(name).file_system_id is None
    }
