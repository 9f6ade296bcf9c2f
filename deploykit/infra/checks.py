"""What is wrong with answers that are each well formed."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deploykit.decode import did_you_mean
from deploykit.infra import ec2
from deploykit.model import Problem

if TYPE_CHECKING:
    from deploykit.infra.answers import Answers, Cluster

_VPC_SIZES = range(16, 29)
_LUSTRE = (1200, 2400)


def check(answers: Answers) -> Iterator[Problem]:
    """Every problem, by its path in the file of answers."""
    if answers.zone[:-1] != answers.region:
        yield Problem("zone", f"is not in {answers.region}", f"for example {answers.region}a")
    yield from _block(answers.block)
    if answers.cluster is not None:
        yield from _cluster(answers.cluster)


def _block(text: str) -> Iterator[Problem]:
    try:
        block = ipaddress.IPv4Network(text)
    except ValueError as error:
        yield Problem("block", str(error), "10.0.0.0/16")
        return
    if block.prefixlen not in _VPC_SIZES:
        yield Problem("block", "a VPC's block is between /16 and /28", "10.0.0.0/16")


def _cluster(cluster: Cluster) -> Iterator[Problem]:
    for key in ("instance_type", "head_type"):
        yield from _type(f"cluster.{key}", getattr(cluster, key))
    if cluster.min_nodes > cluster.max_nodes:
        said = f"is {cluster.min_nodes}, more than max_nodes ({cluster.max_nodes})"
        yield Problem("cluster.min_nodes", said, "0 gives all nodes back when they are idle")
    known = cluster.instance_type in ec2.names()
    if cluster.efa and known and ec2.efa(cluster.instance_type) is False:
        said = f"{cluster.instance_type} has no Elastic Fabric Adapter"
        yield Problem("cluster.efa", said, "efa: false, or a larger type such as g5.8xlarge")
    low, step = _LUSTRE
    if cluster.storage != low and (cluster.storage < step or cluster.storage % step):
        yield Problem("cluster.storage", f"is {cluster.storage}, which FSx has not", "1200 or 2400")


def _type(path: str, name: str) -> Iterator[Problem]:
    if name not in ec2.names():
        near = did_you_mean(name, sorted(ec2.names()))
        yield Problem(path, f"EC2 has no type {name}, as far as this botocore knows", near)
