"""Collect what AWS knows of a job's account and network, live or from a folder of saved responses.

Every request is a get, a list or a describe. One that is denied, or that AWS does not answer, is
stored as its error, so that the findings can say what was not checked.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from deploykit.doctor.aws.inventory import Answers
from deploykit.doctor.aws.requirements import Requirements
from deploykit.job.decode import read_json
from deploykit.lib.errors import BackendUnavailable, DeploykitError, NotFound, NotPermitted

Client = Callable[[str], Any]
"""Creates the boto3 client of a service."""
Errors = Callable[[], AbstractContextManager[None]]
"""A context that turns botocore's exceptions into deploykit's."""
NOT_ANSWERED = "NotAnswered"
"""The code of a stored error that is ours: the request failed, for whatever reason."""
_PATIENCE = 2
"""Requests in a row that a service may leave unanswered before no more are sent to it."""

DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"})
_ANSWERS = DENIED | {
    *("NoSuchEntity", "NoSuchBucket", "NoSuchResourceException", "InvalidInstanceType"),
    *("PermanentRedirect", "301"),
}
"""Error codes that count as responses; any other is `NOT_ANSWERED`."""

OF_VPC = {
    "describe-vpcs": "Filters",
    "describe-subnets": "Filters",
    "describe-security-groups": "Filters",
    "describe-network-acls": "Filters",
    "describe-route-tables": "Filters",
    "describe-vpc-endpoints": "Filters",
    "describe-nat-gateways": "Filter",
}
"""Requests about the VPC of a job, each with the name of its filter argument."""
_ATTRIBUTES = ("enableDnsSupport", "enableDnsHostnames")
_ACTIONS = {"service-quotas": "servicequotas"}


def live(requirements: Requirements, client: Client, errors: Errors) -> Answers:
    """Ask AWS, in about 25 requests.

    Raises NotPermitted without valid credentials, and BackendUnavailable if nothing was answered.
    """
    return _Collector(requirements, client, errors).collect()


def load(folder: Path) -> Answers:
    """Read the responses in `folder`, one JSON file each.

    Raises NotFound if the folder does not exist or a file is not a JSON object.
    """
    if not folder.is_dir():
        raise NotFound(
            f"folder not found: {folder}", hint="create it with `deploykit doctor --save FOLDER`"
        )
    return {path.stem: _json(path) for path in sorted(folder.glob("*.json"))}


def save(answers: Answers, folder: Path) -> None:
    """Write each response to ``COMMAND.json`` in `folder`, for `load`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, answer in answers.items():
        (folder / f"{name}.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")


def _json(path: Path) -> Any:
    try:
        answer = read_json(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it {error}"
        raise NotFound(f"{path} is not a JSON response from AWS: {reason}") from error
    if not isinstance(answer, dict):
        raise NotFound(f"{path} is not a JSON response from AWS", hint="save it with --output json")
    return answer


class _Collector:
    """Sends the requests in order, since some depend on earlier responses."""

    def __init__(self, requirements: Requirements, client: Client, errors: Errors) -> None:
        self._requirements, self._client, self._errors = requirements, client, errors
        self._clients: dict[str, Any] = {}
        self._answers: dict[str, Any] = {}
        self._answered = False
        self._silent: Counter[str] = Counter()
        """By service, the last requests in a row without an answer."""
        self._failure = DeploykitError("nothing was asked")

    def collect(self) -> Answers:
        required = self._requirements
        self._keep("get-caller-identity", "sts")
        self._role()
        for bucket in required.buckets:
            owned = {"Bucket": bucket, "ExpectedBucketOwner": required.owner}
            self._keep("get-bucket-location", "s3", bucket, **owned)
        self._quotas()
        self._keep("describe-instance-types", "ec2", InstanceTypes=[required.instance_type])
        if required.subnets:
            self._network()
        if not self._answered:
            raise self._failure
        return self._answers

    def _keep(self, command: str, service: str, about: str = "", **arguments: Any) -> Any:
        answer = self._ask(command, service, **arguments)
        self._answers[f"{command}-{about}" if about else command] = answer
        return answer

    def _ask(self, command: str, service: str, **arguments: Any) -> Any:
        """The complete response, or why there is none."""
        action = _action(command, service)
        if self._silent[service] < _PATIENCE:
            try:
                with self._errors():
                    answer = self._sent(command, service, action, arguments)
            except NotPermitted:
                raise  # no valid credentials: a denied request is an answer
            except DeploykitError as error:
                self._failure = error
                unreachable = isinstance(error, BackendUnavailable)
                self._silent[service] = self._silent[service] + 1 if unreachable else 0
            else:
                self._answered, self._silent[service] = True, 0
                return answer
        text = str(self._failure)
        return {"Error": {"Code": NOT_ANSWERED, "Message": text, "Action": action}}

    def _sent(self, command: str, service: str, action: str, arguments: Mapping[str, Any]) -> Any:
        """The complete response, all pages of it, as plain JSON data."""
        if service not in self._clients:
            self._clients[service] = self._client(service)
        client, name = self._clients[service], command.replace("-", "_")
        try:
            if client.can_paginate(name):
                answer = client.get_paginator(name).paginate(**arguments).build_full_result()
            else:
                answer = getattr(client, name)(**arguments)
        except client.exceptions.ClientError as error:
            response = error.response.get("Error", {})
            if response.get("Code") not in _ANSWERS:
                raise
            return {"Error": {**response, "Action": action}}
        answer.pop("ResponseMetadata", None)
        return json.loads(json.dumps(answer, default=str))

    def _role(self) -> None:
        name = self._requirements.role_name
        role = self._keep("get-role", "iam", RoleName=name)
        if "Error" in role:
            return
        boundary = role["Role"].get("PermissionsBoundary", {}).get("PermissionsBoundaryArn")
        try:
            self._answers["role-policies"] = {
                "Documents": list(self._policies(name)),
                "Boundary": self._managed(boundary) if boundary else None,
            }
        except _DeniedError as denied:
            self._answers["role-policies"] = denied.answer

    def _policies(self, role: str) -> Iterator[Any]:
        """Every policy document of the role, attached and inline."""
        attached = self._ask_iam("list-attached-role-policies", RoleName=role)
        for policy in attached["AttachedPolicies"]:
            yield self._managed(policy["PolicyArn"])
        for name in self._ask_iam("list-role-policies", RoleName=role)["PolicyNames"]:
            answer = self._ask_iam("get-role-policy", RoleName=role, PolicyName=name)
            yield answer["PolicyDocument"]

    def _managed(self, arn: str) -> Any:
        version = self._ask_iam("get-policy", PolicyArn=arn)["Policy"]["DefaultVersionId"]
        answer = self._ask_iam("get-policy-version", PolicyArn=arn, VersionId=version)
        return answer["PolicyVersion"]["Document"]

    def _ask_iam(self, command: str, **arguments: Any) -> Any:
        answer = self._ask(command, "iam", **arguments)
        if "Error" in answer:
            raise _DeniedError(answer)
        return answer

    def _quotas(self) -> None:
        """Keep only the quota that matters: SageMaker has thousands."""
        answer = self._keep("list-service-quotas", "service-quotas", ServiceCode="sagemaker")
        if "Quotas" in answer:
            name = self._requirements.quota
            kept = [quota for quota in answer["Quotas"] if quota.get("QuotaName") == name]
            self._answers["list-service-quotas"] = {"Quotas": kept}

    def _network(self) -> None:
        required = self._requirements
        subnets = self._ask("describe-subnets", "ec2", **_filter("subnet-id", required.subnets))
        groups = self._ask(
            "describe-security-groups", "ec2", **_filter("group-id", required.groups)
        )
        existing = [*subnets.get("Subnets", ()), *groups.get("SecurityGroups", ())]
        vpcs = tuple(sorted({one["VpcId"] for one in existing}))
        for command, key in OF_VPC.items():
            self._keep(command, "ec2", **_filter("vpc-id", vpcs, key))
        self._keep("describe-prefix-lists", "ec2")
        for vpc in vpcs:
            for attribute in _ATTRIBUTES:
                about = f"{attribute}-{vpc}"
                self._keep("describe-vpc-attribute", "ec2", about, VpcId=vpc, Attribute=attribute)


class _DeniedError(Exception):
    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__()
        self.answer = answer


def _filter(name: str, values: tuple[str, ...], key: str = "Filters") -> dict[str, Any]:
    return {key: [{"Name": name, "Values": list(values)}]}


def _action(command: str, service: str) -> str:
    """The IAM action that a command requires: ``ec2:DescribeSubnets``."""
    return f"{_ACTIONS.get(service, service)}:{command.title().replace('-', '')}"
