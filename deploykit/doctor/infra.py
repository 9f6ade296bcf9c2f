"""The infrastructure that a job requires, rendered from a few answers: stack, cluster, image."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from deploykit.doctor.requirements import BUCKET, REGION
from deploykit.job import file as jobfile
from deploykit.job.decode import Bounds, Help, Pattern, decode
from deploykit.job.model import Problem
from deploykit.job.spelling import did_you_mean
from deploykit.lib import render, shell
from deploykit.lib.errors import JobFileError

NAME = Pattern(r"[a-z][a-z0-9-]{0,38}[a-z0-9]", "at most 40 lowercase letters, digits and hyphens")
ZONE = Pattern(REGION.regex + "[a-z]", "an availability zone such as us-east-1a")
BLOCK = Pattern(r"[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}", "a CIDR block such as 10.0.0.0/16")
MAIL = Pattern(r"[^@\s]+@[^@\s]+\.[^@\s]+", "an e-mail address")
SUBNET = Pattern(r"subnet-([0-9a-f]{8}|[0-9a-f]{17})", "an ID such as subnet-0123456789abcdef0")
TYPE = Pattern(
    r"[a-z0-9-]+\.[a-z0-9-]+", "an EC2 instance type such as g5.12xlarge, not ml.g5.12xlarge"
)
KEY = Pattern(r"[!-~]{1,255}", "the name of an EC2 key pair")

_PCLUSTER_VERSION = "3.16.1"
"""ParallelCluster's version: that of the configuration, and of the tests."""
_VPC_PREFIX_LENGTHS = range(16, 29)
_LUSTRE_MINIMUM, _LUSTRE_STEP = 1200, 2400
"""Sizes of FSx for Lustre (SCRATCH_2) in GiB: 1200, or a multiple of 2400."""


@dataclass(frozen=True)
class Cluster:
    """A Slurm cluster created by AWS ParallelCluster.

    https://docs.aws.amazon.com/parallelcluster/latest/ug/cluster-configuration-file-v3.html
    """

    head_subnet: Annotated[
        str,
        Help("Subnet of the head node; must have internet access.", "subnet-0123456789abcdef0"),
        SUBNET,
    ]
    subnet: Annotated[
        str,
        Help("Subnet of the compute nodes; must have internet access.", "subnet-0123456789abcdef1"),
        SUBNET,
    ]
    instance_type: Annotated[
        str, Help("EC2 instance type of the compute nodes.", "p4d.24xlarge"), TYPE
    ]
    max_nodes: Annotated[int, Help("Maximum number of compute nodes.", "4"), Bounds(1, 1000)]
    min_nodes: Annotated[
        int, Help("Number of compute nodes to keep running when idle; they are billed."), Bounds(0)
    ] = 0
    efa: Annotated[
        bool, Help("Use the Elastic Fabric Adapter; not all instance types support it.")
    ] = False
    head_type: Annotated[str, Help("EC2 instance type of the head node."), TYPE] = "m5.large"
    key: Annotated[
        str | None, Help("EC2 key pair for ssh; without one, log in with Session Manager."), KEY
    ] = None
    storage: Annotated[
        int,
        Help("Size of the shared FSx for Lustre file system in GiB: 1200 or a multiple of 2400."),
    ] = 1200


@dataclass(frozen=True)
class Answers:
    """What to create and where."""

    name: Annotated[str, Help("Name of the stack, the role and the cluster.", "training"), NAME]
    region: Annotated[str, Help("AWS region.", "us-east-1"), REGION]
    zone: Annotated[
        str,
        Help("Availability zone of the subnet; EFA traffic stays in one zone.", "us-east-1a"),
        ZONE,
    ]
    bucket: Annotated[
        str,
        Help("Bucket to create, for sources, data, checkpoints and outputs.", "my-bucket"),
        BUCKET,
    ]
    email: Annotated[
        str, Help("Address for budget alerts, and for `notify`.", "me@example.com"), MAIL
    ]
    monthly_budget: Annotated[
        int,
        Help("Monthly budget for the whole account in US dollars; alerts at 80% and 100%.", "500"),
        Bounds(1, unit="US dollars"),
    ]
    block: Annotated[str, Help("CIDR block of the new VPC."), BLOCK] = "10.0.0.0/16"
    prefix: Annotated[str, Help("`sagemaker.prefix` in the job files."), NAME] = "deploykit"
    keep_sources: Annotated[
        int,
        Help("Number of days after which uploaded sources are deleted from the bucket."),
        Bounds(1, unit="days"),
    ] = 90
    log_group: Annotated[
        bool,
        Help("Create the log group for training jobs; set to `false` if it already exists."),
    ] = True
    notify: Annotated[
        bool,
        Help("Send an e-mail to `email` when a training job with the stack's role ends."),
    ] = False
    cluster: Annotated[Cluster | None, Help("Also create a Slurm cluster.")] = None


def load(path: Path) -> Answers:
    """Read the answers in `path`. Raises NotFound, or JobFileError with every problem."""
    tree, lines = jobfile.parse(path)
    answers, errors = decode(Answers, tree)
    if answers is not None:
        errors = list(problems(answers))
    if errors or answers is None:
        raise JobFileError(str(path), jobfile.located(errors, lines))
    return answers


def problems(answers: Answers) -> Iterator[Problem]:
    """Every problem, by its path in the file of answers. Raises ImportError without botocore."""
    if answers.zone[:-1] != answers.region:
        yield Problem("zone", f"is not in {answers.region}", f"for example {answers.region}a")
    try:
        block = ipaddress.IPv4Network(answers.block)
    except ValueError as error:
        yield Problem("block", str(error), "10.0.0.0/16")
    else:
        if block.prefixlen not in _VPC_PREFIX_LENGTHS:
            yield Problem("block", "must be between /16 and /28 for a VPC", "10.0.0.0/16")
    if answers.cluster is not None:
        yield from _cluster_problems(answers.cluster)


def _cluster_problems(cluster: Cluster) -> Iterator[Problem]:
    known_types = _instance_types()
    for key, name in (("instance_type", cluster.instance_type), ("head_type", cluster.head_type)):
        if name not in known_types:
            message = f"the installed botocore does not know the EC2 instance type {name}"
            near = did_you_mean(name, sorted(known_types))
            yield Problem(f"cluster.{key}", message, near)
    if cluster.min_nodes > cluster.max_nodes:
        message = f"must be at most max_nodes, which is {cluster.max_nodes}"
        yield Problem("cluster.min_nodes", message, "0 terminates all idle nodes")
    size = cluster.storage
    if size != _LUSTRE_MINIMUM and (size < _LUSTRE_STEP or size % _LUSTRE_STEP):
        yield Problem(
            "cluster.storage",
            f"FSx for Lustre does not support a size of {size} GiB",
            "1200 or 2400",
        )


@functools.cache
def _instance_types() -> frozenset[str]:
    """Every type in botocore's model of EC2. Raises ImportError without botocore."""
    from botocore.loaders import Loader

    model = Loader().load_service_model("ec2", "service-2")
    return frozenset(model["shapes"]["InstanceType"]["enum"])


def files(answers: Answers) -> Mapping[str, str]:
    """Text by file name: the stack, the image, and the cluster if the answers have one."""
    texts = {
        "stack.yaml": render.data("infra/stack.yaml.j2", **vars(answers)),
        "Dockerfile": render.data("infra/Dockerfile.j2"),
    }
    if answers.cluster is not None:
        china, government = (answers.region.startswith(start) for start in ("cn-", "us-gov-"))
        texts["cluster.yaml"] = render.data(
            "infra/cluster.yaml.j2",
            **vars(answers),
            version=_PCLUSTER_VERSION,
            partition="aws-cn" if china else "aws-us-gov" if government else "aws",
        )
    return texts


def commands(answers: Answers) -> list[str]:
    """The shell commands that create everything, in order; to be run in the folder of the files."""
    region = ("--region", answers.region)
    stack = (*region, "--stack-name", answers.name)
    deploy = ("--template-file", "stack.yaml", "--capabilities", "CAPABILITY_NAMED_IAM")
    show = ("--query", "Stacks[0].Outputs", "--output", "table")
    argvs: list[tuple[str, ...]] = [
        ("aws", "cloudformation", "deploy", *stack, *deploy),
        ("aws", "cloudformation", "describe-stacks", *stack, *show),
    ]
    if answers.cluster is not None:
        cluster = ("--cluster-name", answers.name, "--cluster-configuration", "cluster.yaml")
        argvs.append(("pcluster", "create-cluster", *region, *cluster))
    return [shell.command(*words) for words in argvs]
