"""The answers that the templates are filled in from: the file `infra.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from deploykit import jobfile
from deploykit.backends.sagemaker.sections import BUCKET, REGION
from deploykit.decode import decode
from deploykit.errors import JobFileError
from deploykit.fields import Bounds, Help, Pattern
from deploykit.infra import checks

NAME = Pattern(r"[a-z][a-z0-9-]{0,38}[a-z0-9]", "small letters, digits and hyphens, at most 40")
ZONE = Pattern(REGION.regex + "[a-z]", "an availability zone such as us-east-1a")
BLOCK = Pattern(r"[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}", "a block such as 10.0.0.0/16")
MAIL = Pattern(r"[^@\s]+@[^@\s]+\.[^@\s]+", "an e-mail address")
SUBNET = Pattern(r"subnet-([0-9a-f]{8}|[0-9a-f]{17})", "an id such as subnet-0123456789abcdef0")
TYPE = Pattern(r"[a-z0-9-]+\.[a-z0-9-]+", "an EC2 type such as g5.12xlarge, without ml.")
KEY = Pattern(r"[!-~]{1,255}", "the name of an EC2 key pair")


@dataclass(frozen=True)
class Cluster:
    """A Slurm cluster by AWS ParallelCluster.

    https://docs.aws.amazon.com/parallelcluster/latest/ug/cluster-configuration-file-v3.html
    """

    head_subnet: Annotated[
        str,
        Help("Subnet of the head node, with a way to the internet.", "subnet-0123456789abcdef0"),
        SUBNET,
    ]
    subnet: Annotated[
        str,
        Help(
            "Subnet of the compute nodes, with a way to the internet.", "subnet-0123456789abcdef1"
        ),
        SUBNET,
    ]
    instance_type: Annotated[
        str, Help("Type of the compute nodes, as EC2 calls it.", "p4d.24xlarge"), TYPE
    ]
    max_nodes: Annotated[int, Help("Nodes at most.", "4"), Bounds(1, 1000)]
    min_nodes: Annotated[int, Help("Nodes that are never given back; billed."), Bounds(0)] = 0
    efa: Annotated[bool, Help("Use the Elastic Fabric Adapter; not every type has it.")] = False
    head_type: Annotated[str, Help("Type of the head node."), TYPE] = "m5.large"
    key: Annotated[
        str | None, Help("EC2 key pair for ssh; without it, log in by Session Manager."), KEY
    ] = None
    storage: Annotated[
        int, Help("Size of the shared file system (FSx for Lustre) in GiB: 1200, or n x 2400.")
    ] = 1200


@dataclass(frozen=True)
class Answers:
    """What is made, and where."""

    name: Annotated[str, Help("Name of the stack, the role and the cluster.", "training"), NAME]
    region: Annotated[str, Help("Region of everything.", "us-east-1"), REGION]
    zone: Annotated[
        str, Help("Zone of the subnet; traffic over EFA stays in one zone.", "us-east-1a"), ZONE
    ]
    bucket: Annotated[
        str,
        Help("Bucket to make, for sources, data, checkpoints and results.", "my-bucket"),
        BUCKET,
    ]
    email: Annotated[str, Help("Who is told about money.", "me@example.com"), MAIL]
    monthly_budget: Annotated[
        int,
        Help("US dollars a month, of the whole account; mail at 80% and 100%.", "500"),
        Bounds(1),
    ]
    block: Annotated[str, Help("Addresses of the new VPC."), BLOCK] = "10.0.0.0/16"
    prefix: Annotated[str, Help("`sagemaker.prefix` of the job files."), NAME] = "deploykit"
    keep_sources: Annotated[
        int, Help("Days after which uploaded sources are deleted from the bucket."), Bounds(1)
    ] = 90
    log_group: Annotated[
        bool,
        Help("Make the log group of training jobs. `false` where the account has it already."),
    ] = True
    cluster: Annotated[Cluster | None, Help("A Slurm cluster too.")] = None


def load(path: Path) -> Answers:
    """Read `path`. Raises NotFound, or JobFileError with every problem."""
    tree, lines = jobfile.parse(path)
    found, problems = decode(Answers, tree)
    if found is not None:
        problems = list(checks.check(found))
    if problems or found is None:
        raise JobFileError(str(path), jobfile.located(problems, lines))
    return found
