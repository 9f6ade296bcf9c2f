"""Reading the answers, and problems between answers that are each well formed."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from deploykit.doctor.infra import ec2
from deploykit.doctor.infra.answers import Answers, Cluster
from deploykit.job import file as jobfile
from deploykit.job.decode import decode
from deploykit.job.model import Problem
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import JobFileError

_VPC_PREFIX_LENGTHS = range(16, 29)
_LUSTRE_MINIMUM, _LUSTRE_STEP = 1200, 2400
"""Sizes of FSx for Lustre (SCRATCH_2) in GiB: 1200, or a multiple of 2400."""


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
    yield from _block(answers.block)
    if answers.cluster is not None:
        yield from _cluster(answers.cluster)


def _block(text: str) -> Iterator[Problem]:
    try:
        block = ipaddress.IPv4Network(text)
    except ValueError as error:
        yield Problem("block", str(error), "10.0.0.0/16")
        return
    if block.prefixlen not in _VPC_PREFIX_LENGTHS:
        yield Problem("block", "a VPC's block is between /16 and /28", "10.0.0.0/16")


def _cluster(cluster: Cluster) -> Iterator[Problem]:
    for key in ("instance_type", "head_type"):
        yield from _instance_type(f"cluster.{key}", getattr(cluster, key))
    if cluster.min_nodes > cluster.max_nodes:
        message = f"is {cluster.min_nodes}, more than max_nodes ({cluster.max_nodes})"
        yield Problem("cluster.min_nodes", message, "0 terminates all nodes when they are idle")
    known = cluster.instance_type in ec2.instance_types()
    if cluster.efa and known and ec2.has_efa(cluster.instance_type) is False:
        message = f"{cluster.instance_type} has no Elastic Fabric Adapter"
        yield Problem("cluster.efa", message, "efa: false, or a larger type such as g5.8xlarge")
    size = cluster.storage
    if size != _LUSTRE_MINIMUM and (size < _LUSTRE_STEP or size % _LUSTRE_STEP):
        yield Problem("cluster.storage", f"FSx has no size of {size} GiB", "1200 or 2400")


def _instance_type(path: str, name: str) -> Iterator[Problem]:
    if name not in ec2.instance_types():
        near = did_you_mean(name, sorted(ec2.instance_types()))
        yield Problem(path, f"unknown EC2 instance type {name} (by the installed botocore)", near)
