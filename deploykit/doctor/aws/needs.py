"""What a SageMaker job asks of the account and of the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploykit import contract
from deploykit.model import JobSpec

if TYPE_CHECKING:
    from deploykit.backends.sagemaker.options import Options

Ports = tuple[int, int]
"""First and last port, both included."""

ANY: Ports = (0, 65535)
EPHEMERAL: Ports = (32768, 60999)
"""Linux takes the port of an outgoing connection, and of NCCL's, Gloo's and c10d's listeners,
from here: https://docs.kernel.org/networking/ip-sysctl.html (ip_local_port_range)."""
HTTPS: Ports = (443, 443)
_TORCHRUN: Ports = (7777, 7777)
"""MASTER_PORT of SageMaker's launcher:
https://github.com/aws/sagemaker-training-toolkit (torch_distributed.py)."""
_SSH: Ports = (22, 22)


@dataclass(frozen=True)
class Flow:
    """Packets that must pass: a protocol by EC2's name or number, and the ports they go to."""

    protocol: str
    ports: tuple[Ports, ...] = (ANY,)


ESP, IKE = Flow("50"), Flow("udp", ((500, 500),))
"""What encrypted traffic between containers is made of: https://docs.aws.amazon.com/sagemaker/
latest/dg/train-encrypt.html."""


@dataclass(frozen=True)
class Needs:
    """The parts of a job that a check looks at."""

    region: str
    role: str
    instance_type: str
    """As EC2 calls it, without ``ml.``."""
    nodes: int
    subnets: tuple[str, ...]
    groups: tuple[str, ...]
    written: tuple[str, ...]
    """Buckets that the job reads and writes."""
    read: tuple[str, ...]
    """Buckets that it only reads."""
    owner: str
    """Account that must own the buckets."""
    quota: str
    """Name of the quota that limits the number of machines."""
    encrypted: bool = False
    secrets: tuple[str, ...] = ()
    """Services that the nodes ask for secrets: ``ssm``, ``secretsmanager``."""
    peers: tuple[Flow, ...] = ()
    """What the machines send each other; nothing where there is one."""

    @property
    def buckets(self) -> tuple[str, ...]:
        return (*self.written, *self.read)

    @property
    def role_name(self) -> str:
        return self.role.rpartition("/")[2]


def of(job: JobSpec, options: Options, region: str) -> Needs:
    """The needs of a job file."""
    written, read = _buckets(job, options)
    use = "spot training job" if options.spot else "training job"
    return Needs(
        region=region,
        role=options.role,
        instance_type=options.training_type.removeprefix("ml."),
        nodes=job.resources.nodes,
        subnets=options.subnets,
        groups=options.security_group_ids,
        written=written,
        read=read,
        owner=options.owner,
        quota=f"{options.training_type} for {use} usage",
        encrypted=options.encrypt_inter_container_traffic and job.resources.nodes > 1,
        secrets=_secrets(job),
        peers=_peers(job, options),
    )


def _buckets(job: JobSpec, options: Options) -> tuple[tuple[str, ...], tuple[str, ...]]:
    places = contract.locations(job)
    named = {path: place.split("/")[2] for path, place in places.items() if "://" in place}
    written = {
        options.bucket,
        *(named[path] for path in ("output", "checkpoints") if path in named),
    }
    read = set(named.values()) - written
    return tuple(sorted(written)), tuple(sorted(read))


def _secrets(job: JobSpec) -> tuple[str, ...]:
    values = (value.split(":")[1] for value in job.env.values() if contract.is_secret(value))
    return tuple(sorted(set(values)))


def _peers(job: JobSpec, options: Options) -> tuple[Flow, ...]:
    if job.resources.nodes == 1:
        return ()
    first = _TORCHRUN if options.by_torchrun else _SSH
    encryption = (IKE, ESP) if options.encrypt_inter_container_traffic else ()
    return (Flow("tcp", (first, EPHEMERAL)), *encryption)
