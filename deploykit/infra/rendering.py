"""The templates, filled in."""

from __future__ import annotations

from collections.abc import Mapping

from deploykit import quoting, render
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
    where = ("--region", answers.region)
    stack = (*where, "--stack-name", answers.name)
    deploy = ("--template-file", "stack.yaml", "--capabilities", "CAPABILITY_NAMED_IAM")
    show = ("--query", "Stacks[0].Outputs", "--output", "table")
    commands: list[tuple[str, ...]] = [
        ("aws", "cloudformation", "deploy", *stack, *deploy),
        ("aws", "cloudformation", "describe-stacks", *stack, *show),
    ]
    if answers.cluster is not None:
        cluster = ("--cluster-name", answers.name, "--cluster-configuration", "cluster.yaml")
        commands.append(("pcluster", "create-cluster", *where, *cluster))
    return [quoting.command(*words) for words in commands]


def _partition(region: str) -> str:
    found = (name for start, name in _PARTITIONS.items() if region.startswith(start))
    return next(found, "aws")
