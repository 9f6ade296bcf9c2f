"""The schema of `infra.yaml`: the answers from which the templates are rendered.

Region and bucket follow the patterns of the `sagemaker` section, since its job files name what
these answers create.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from deploykit.doctor.aws_names import BUCKET, REGION
from deploykit.job.decode import Bounds, Help, Pattern

NAME = Pattern(r"[a-z][a-z0-9-]{0,38}[a-z0-9]", "lowercase letters, digits and hyphens, at most 40")
ZONE = Pattern(REGION.regex + "[a-z]", "an availability zone such as us-east-1a")
BLOCK = Pattern(r"[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}", "a CIDR block such as 10.0.0.0/16")
MAIL = Pattern(r"[^@\s]+@[^@\s]+\.[^@\s]+", "an e-mail address")
SUBNET = Pattern(r"subnet-([0-9a-f]{8}|[0-9a-f]{17})", "an id such as subnet-0123456789abcdef0")
TYPE = Pattern(r"[a-z0-9-]+\.[a-z0-9-]+", "an EC2 instance type such as g5.12xlarge, without ml.")
KEY = Pattern(r"[!-~]{1,255}", "the name of an EC2 key pair")


@dataclass(frozen=True)
class Cluster:
    """A Slurm cluster created by AWS ParallelCluster.

    https://docs.aws.amazon.com/parallelcluster/latest/ug/cluster-configuration-file-v3.html
    """

    head_subnet: Annotated[
        str,
        Help("Subnet of the head node; needs internet access.", "subnet-0123456789abcdef0"),
        SUBNET,
    ]
    subnet: Annotated[
        str,
        Help("Subnet of the compute nodes; needs internet access.", "subnet-0123456789abcdef1"),
        SUBNET,
    ]
    instance_type: Annotated[
        str, Help("EC2 instance type of the compute nodes.", "p4d.24xlarge"), TYPE
    ]
    max_nodes: Annotated[int, Help("Maximum number of compute nodes.", "4"), Bounds(1, 1000)]
    min_nodes: Annotated[
        int, Help("Compute nodes that are kept running, and billed, when idle."), Bounds(0)
    ] = 0
    efa: Annotated[bool, Help("Use the Elastic Fabric Adapter; not all types have it.")] = False
    head_type: Annotated[str, Help("EC2 instance type of the head node."), TYPE] = "m5.large"
    key: Annotated[
        str | None, Help("EC2 key pair for ssh; without one, log in with Session Manager."), KEY
    ] = None
    storage: Annotated[
        int, Help("Size of the shared file system (FSx for Lustre) in GiB: 1200, or n x 2400.")
    ] = 1200


@dataclass(frozen=True)
class Answers:
    """What to create, and where."""

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
    email: Annotated[str, Help("Address for budget alerts.", "me@example.com"), MAIL]
    monthly_budget: Annotated[
        int,
        Help("Budget of the whole account in US dollars a month; alerts at 80% and 100%.", "500"),
        Bounds(1, unit="US dollars"),
    ]
    block: Annotated[str, Help("CIDR block of the new VPC."), BLOCK] = "10.0.0.0/16"
    prefix: Annotated[str, Help("`sagemaker.prefix` of the job files."), NAME] = "deploykit"
    keep_sources: Annotated[
        int,
        Help("Days after which uploaded sources are deleted from the bucket."),
        Bounds(1, unit="days"),
    ] = 90
    log_group: Annotated[
        bool,
        Help("Create the log group of training jobs; `false` if the account already has it."),
    ] = True
    cluster: Annotated[Cluster | None, Help("Also create a Slurm cluster.")] = None
