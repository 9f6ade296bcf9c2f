"""Rendering the templates, and the commands that create what they describe."""

from __future__ import annotations

from collections.abc import Mapping

from deploykit.doctor.infra.answers import Answers
from deploykit.lib import render, shell

_VERSIONS = {"version": "3.16.1"}
"""ParallelCluster's version: that of the configuration, and of the tests."""
_PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}


def files(answers: Answers) -> Mapping[str, str]:
    """Text by file name: the stack, the image, and the cluster if the answers have one."""
    texts = {
        "stack.yaml": render.data("infra/stack.yaml.j2", **vars(answers)),
        "Dockerfile": render.data("infra/Dockerfile.j2"),
    }
    if answers.cluster is not None:
        cluster = {**vars(answers), "partition": _partition(answers.region), **_VERSIONS}
        texts["cluster.yaml"] = render.data("infra/cluster.yaml.j2", **cluster)
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


def _partition(region: str) -> str:
    names = (name for prefix, name in _PARTITIONS.items() if region.startswith(prefix))
    return next(names, "aws")
