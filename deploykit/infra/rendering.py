"""The templates, filled in."""

from __future__ import annotations

from collections.abc import Mapping

from deploykit import render
from deploykit.infra.answers import Answers

_VERSIONS = {"version": "3.16.1"}
"""Of ParallelCluster: whose configuration is written, and that the tests ask."""
_PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}


def files(answers: Answers) -> Mapping[str, str]:
    """Every file by its name: the stack, the image, and the cluster where one is asked for."""
    found = {
        "stack.yaml": render.data("infra/stack.yaml.j2", **vars(answers)),
        "Dockerfile": render.data("infra/Dockerfile.j2"),
    }
    if answers.cluster is not None:
        cluster = {**vars(answers), "partition": _partition(answers.region), **_VERSIONS}
        found["cluster.yaml"] = render.data("infra/cluster.yaml.j2", **cluster)
    return found


def after(answers: Answers) -> list[str]:
    """The commands that make it all, in their order."""
    where = f"--region {answers.region}"
    stack = f"{where} --stack-name {answers.name}"
    deploy = "--template-file stack.yaml --capabilities CAPABILITY_NAMED_IAM"
    show = "--query Stacks[0].Outputs --output table"
    commands = [
        f"aws cloudformation deploy {stack} {deploy}",
        f"aws cloudformation describe-stacks {stack} {show}",
    ]
    if answers.cluster is not None:
        commands.append(
            f"pcluster create-cluster {where} --cluster-name {answers.name} "
            "--cluster-configuration cluster.yaml"
        )
    return commands


def _partition(region: str) -> str:
    found = (name for start, name in _PARTITIONS.items() if region.startswith(start))
    return next(found, "aws")
