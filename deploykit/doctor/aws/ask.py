"""Collect what AWS says about the place of a job, live or from a folder of saved answers.

Nothing is changed: every question is a get, a list or a describe. An answer that is refused is
kept as it is, so that the findings say what could not be looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deploykit.doctor.aws.facts import Answers
from deploykit.doctor.aws.needs import Needs
from deploykit.errors import NotFound

Client = Callable[[str], Any]
"""Makes the client of a service."""

DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"})
_ANSWERS = DENIED | {
    *("NoSuchEntity", "NoSuchBucket", "NoSuchResourceException", "InvalidInstanceType"),
    *("PermanentRedirect", "301"),
}
"""Errors that are facts; any other one ends the visit."""

OF_VPC = {
    "describe-vpcs": "Filters",
    "describe-subnets": "Filters",
    "describe-security-groups": "Filters",
    "describe-network-acls": "Filters",
    "describe-route-tables": "Filters",
    "describe-vpc-endpoints": "Filters",
    "describe-nat-gateways": "Filter",
}
"""Questions about the VPC of a job, and how each calls its filters."""
_ATTRIBUTES = ("enableDnsSupport", "enableDnsHostnames")
_ACTIONS = {"service-quotas": "servicequotas"}


def live(needs: Needs, client: Client) -> Answers:
    """What AWS says now, in about 25 requests. Raises what the client raises for other errors."""
    return _Visit(needs, client).answers


def load(folder: Path) -> Answers:
    """The answers in `folder`, one JSON file each. Raises NotFound for a file that is no JSON."""
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}", hint="make one with `doctor --save FOLDER`")
    return {path.stem: _json(path) for path in sorted(folder.glob("*.json"))}


def save(answers: Answers, folder: Path) -> None:
    """Write each answer as ``<its command>.json``, for `load`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, answer in answers.items():
        (folder / f"{name}.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")


def _json(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NotFound(f"{path} is not the JSON of an answer: {error}") from error
    if not isinstance(found, dict):
        raise NotFound(f"{path} is not the JSON of an answer", hint="save it with --output json")
    return found


class _Visit:
    """The questions in their order, since some depend on earlier answers."""

    def __init__(self, needs: Needs, client: Client) -> None:
        self._needs, self._client = needs, client
        self._clients: dict[str, Any] = {}
        self.answers: dict[str, Any] = {}
        self._keep("get-caller-identity", "sts")
        self._role()
        for bucket in needs.buckets:
            self._keep("get-bucket-location", "s3", bucket, Bucket=bucket)
        self._quotas()
        self._keep("describe-instance-types", "ec2", InstanceTypes=[needs.instance_type])
        if needs.subnets:
            self._network()

    def _keep(self, command: str, service: str, about: str = "", **arguments: Any) -> Any:
        answer = self._ask(command, service, **arguments)
        self.answers[f"{command}-{about}" if about else command] = answer
        return answer

    def _ask(self, command: str, service: str, **arguments: Any) -> Any:
        """A whole answer, all pages of it, as plain JSON data."""
        if service not in self._clients:
            self._clients[service] = self._client(service)
        client, name = self._clients[service], command.replace("-", "_")
        try:
            if client.can_paginate(name):
                answer = client.get_paginator(name).paginate(**arguments).build_full_result()
            else:
                answer = getattr(client, name)(**arguments)
        except Exception as error:
            told = getattr(error, "response", {}).get("Error", {})
            if told.get("Code") not in _ANSWERS:
                raise
            return {"Error": {**told, "Action": _action(command, service)}}
        answer.pop("ResponseMetadata", None)
        return json.loads(json.dumps(answer, default=str))

    def _role(self) -> None:
        name = self._needs.role_name
        role = self._keep("get-role", "iam", RoleName=name)
        if "Error" in role:
            return
        boundary = role["Role"].get("PermissionsBoundary", {}).get("PermissionsBoundaryArn")
        try:
            self.answers["role-policies"] = {
                "Documents": list(self._policies(name)),
                "Boundary": self._managed(boundary) if boundary else None,
            }
        except _Refused as refused:
            self.answers["role-policies"] = refused.answer

    def _policies(self, role: str) -> Iterator[Any]:
        """Every policy of the role, attached and inline."""
        attached = self._must("list-attached-role-policies", RoleName=role)
        for policy in attached["AttachedPolicies"]:
            yield self._managed(policy["PolicyArn"])
        for name in self._must("list-role-policies", RoleName=role)["PolicyNames"]:
            answer = self._must("get-role-policy", RoleName=role, PolicyName=name)
            yield answer["PolicyDocument"]

    def _managed(self, arn: str) -> Any:
        version = self._must("get-policy", PolicyArn=arn)["Policy"]["DefaultVersionId"]
        answer = self._must("get-policy-version", PolicyArn=arn, VersionId=version)
        return answer["PolicyVersion"]["Document"]

    def _must(self, command: str, **arguments: Any) -> Any:
        answer = self._ask(command, "iam", **arguments)
        if "Error" in answer:
            raise _Refused(answer)
        return answer

    def _quotas(self) -> None:
        """Only the one that counts: SageMaker has thousands."""
        answer = self._keep("list-service-quotas", "service-quotas", ServiceCode="sagemaker")
        kept = [one for one in answer.get("Quotas", ()) if one["QuotaName"] == self._needs.quota]
        if "Quotas" in answer:
            self.answers["list-service-quotas"] = {"Quotas": kept}

    def _network(self) -> None:
        chosen = self._ask("describe-subnets", "ec2", **_filter("subnet-id", self._needs.subnets))
        groups = self._ask(
            "describe-security-groups", "ec2", **_filter("group-id", self._needs.groups)
        )
        named = [*chosen.get("Subnets", ()), *groups.get("SecurityGroups", ())]
        vpcs = tuple(sorted({one["VpcId"] for one in named}))
        for command, key in OF_VPC.items():
            self._keep(command, "ec2", **_filter("vpc-id", vpcs, key))
        self._keep("describe-prefix-lists", "ec2")
        for vpc in vpcs:
            for attribute in _ATTRIBUTES:
                about = f"{attribute}-{vpc}"
                self._keep("describe-vpc-attribute", "ec2", about, VpcId=vpc, Attribute=attribute)


class _Refused(Exception):
    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__()
        self.answer = answer


def _filter(name: str, values: tuple[str, ...], key: str = "Filters") -> dict[str, Any]:
    return {key: [{"Name": name, "Values": list(values)}]}


def _action(command: str, service: str) -> str:
    """The action in IAM's words that a command needs: ``ec2:DescribeSubnets``."""
    return f"{_ACTIONS.get(service, service)}:{command.title().replace('-', '')}"
