"""What a SageMaker job requires of the account and of the network, and which names AWS allows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deploykit.job.decode import Pattern

BUCKET = Pattern(
    r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
    "a bucket name of 3 to 63 lower-case letters, digits, dots and hyphens",
)
IMPOSSIBLE_BUCKET = re.compile(
    r"\.\.|^(\d+\.){3}\d+$|^(xn--|sthree-|amzn-s3-demo-)|(-s3alias|--ol-s3|\.mrap|--table-s3)$"
)
"""Names that S3 refuses although they match:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html"""
REGION = Pattern(r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}", "a region such as us-east-1")

Ports = tuple[int, int]
"""First and last port, inclusive."""

ANY: Ports = (0, 65535)
EPHEMERAL: Ports = (32768, 60999)
"""Linux picks the port of an outgoing connection, and of the listeners of NCCL, Gloo and c10d,
from this range: https://docs.kernel.org/networking/ip-sysctl.html (ip_local_port_range)."""
HTTPS: Ports = (443, 443)


@dataclass(frozen=True)
class Flow:
    """Packets that must pass: a protocol by EC2's name or number, and their destination ports."""

    protocol: str
    ports: tuple[Ports, ...] = (ANY,)


ESP, IKE = Flow("50"), Flow("udp", ((500, 500),))
"""The protocols of inter-container traffic encryption:
https://docs.aws.amazon.com/sagemaker/latest/dg/train-encrypt.html."""


@dataclass(frozen=True)
class Requirements:
    region: str
    role: str
    instance_type: str
    """EC2's name, without ``ml.``."""
    nodes: int
    subnets: tuple[str, ...]
    groups: tuple[str, ...]
    """Ids of its security groups."""
    written: tuple[str, ...]
    """Buckets that the job reads and writes."""
    read: tuple[str, ...]
    """Buckets that it only reads."""
    owner: str
    """Account that must own the buckets."""
    quota: str
    """Name of the quota that limits the number of instances."""
    efa: bool | None = False
    """Whether SageMaker's nodes of this type use EFA; None if that is unknown."""
    remote_debug: bool = False
    keys: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """KMS keys, by the ARN or ``*``, with the actions that the role requires on each."""
    secrets: tuple[str, ...] = ()
    """Services from which the nodes read secrets: ``ssm``, ``secretsmanager``."""
    peers: tuple[Flow, ...] = ()
    """Traffic between the nodes; empty for a job of one node."""

    @property
    def buckets(self) -> tuple[str, ...]:
        """All buckets, written ones first."""
        return (*self.written, *self.read)

    @property
    def role_name(self) -> str:
        return self.role.rpartition("/")[2]
