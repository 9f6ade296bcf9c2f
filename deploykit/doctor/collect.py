"""Collect what AWS knows of a job's account and network, live or from a folder of saved responses.

Every request is a get, a list or a describe. One that is denied, or that AWS does not answer, is
stored as its error; `findings` reports everything that could not be checked.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from deploykit.doctor.account import policy_document
from deploykit.doctor.network import Answers, Network
from deploykit.doctor.requirements import Requirements
from deploykit.job.decode import read_json
from deploykit.lib import shell
from deploykit.lib.errors import BackendUnavailable, DeploykitError, NotFound, NotPermitted
from deploykit.lib.finding import Finding, Fix

Client = Callable[[str], Any]
"""Creates the boto3 client of a service."""
Errors = Callable[[], AbstractContextManager[None]]
"""A context that turns botocore's exceptions into deploykit's."""

_NOT_ANSWERED = "NotAnswered"
"""The code of a stored error that is ours: the request failed, for whatever reason."""
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"}
_ANSWERS = {
    *_DENIED,
    *("NoSuchEntity", "NoSuchBucket", "NoSuchResourceException", "InvalidInstanceType"),
    *("PermanentRedirect", "301"),
}
"""Error codes that count as responses; any other is `_NOT_ANSWERED`."""
_MAX_FAILURES = 2
"""Failed requests in a row after which no more are sent to a service."""
_OF_VPC = (
    *("describe-vpcs", "describe-subnets", "describe-security-groups", "describe-network-acls"),
    *("describe-route-tables", "describe-vpc-endpoints", "describe-nat-gateways"),
)
_NETWORK = (*_OF_VPC, "describe-prefix-lists")
_ATTRIBUTES = ("enableDnsSupport", "enableDnsHostnames")
_SAVE = ("deploykit", "doctor", "--backend", "sagemaker", "--save", "FOLDER", "--set")


def live(job: Requirements, client: Client, errors: Errors) -> Answers:
    """Ask AWS, in about 25 requests.

    Raises NotPermitted without valid credentials, and BackendUnavailable if nothing was answered.
    """
    return _Collector(job, client, errors).collect()


def load(folder: Path) -> Answers:
    """Read the responses in `folder`, one JSON file each.

    Raises NotFound if the folder does not exist or a file is not JSON.
    """
    if not folder.is_dir():
        raise NotFound(
            f"folder not found: {folder}", hint="create it with `deploykit doctor --save FOLDER`"
        )
    answers = {}
    for path in sorted(folder.glob("*.json")):
        try:
            answers[path.stem] = read_json(path)
        except ValueError as error:
            raise NotFound(
                f"{path} is not a JSON response from AWS: it {error}",
                hint="save the response with --output json",
            ) from error
    return answers


def save(answers: Answers, folder: Path) -> None:
    """Write each response to ``COMMAND.json`` in `folder`, for `load`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, answer in answers.items():
        (folder / f"{name}.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")


class _Collector:
    """Sends the requests in order, since some depend on earlier responses."""

    def __init__(self, job: Requirements, client: Client, errors: Errors) -> None:
        self._job, self._client, self._errors = job, client, errors
        self._clients: dict[str, Any] = {}
        self._answers: dict[str, Any] = {}
        self._answered = False
        self._failures: Counter[str] = Counter()
        """By service, the last requests in a row that failed."""
        self._error = DeploykitError("no request was sent")

    def collect(self) -> Answers:
        job = self._job
        self._keep("get-caller-identity", "sts")
        self._role()
        for bucket in job.buckets:
            owned = {"Bucket": bucket, "ExpectedBucketOwner": job.owner}
            self._keep("get-bucket-location", "s3", bucket, **owned)
        quotas = self._keep("list-service-quotas", "service-quotas", ServiceCode="sagemaker")
        if "Quotas" in quotas:  # only the one that matters: SageMaker has thousands
            kept = [quota for quota in quotas["Quotas"] if quota.get("QuotaName") == job.quota]
            self._answers["list-service-quotas"] = {"Quotas": kept}
        if job.subnets:
            self._network()
        if not self._answered:
            raise self._error
        return self._answers

    def _keep(self, command: str, service: str, subject: str = "", **arguments: Any) -> Any:
        answer = self._ask(command, service, **arguments)
        self._answers[f"{command}-{subject}" if subject else command] = answer
        return answer

    def _ask(self, command: str, service: str, **arguments: Any) -> Any:
        """The complete response, or why there is none."""
        action = _action(command, service)
        if self._failures[service] < _MAX_FAILURES:
            try:
                with self._errors():
                    answer = self._sent(command, service, action, arguments)
            except NotPermitted:
                raise  # no valid credentials: a denied request is an answer
            except DeploykitError as error:
                self._error = error
                unreachable = isinstance(error, BackendUnavailable)
                self._failures[service] = self._failures[service] + 1 if unreachable else 0
            else:
                self._answered, self._failures[service] = True, 0
                return answer
        return {"Error": {"Code": _NOT_ANSWERED, "Message": str(self._error), "Action": action}}

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
        role = self._keep("get-role", "iam", RoleName=self._job.role_name)
        if "Error" in role:
            return
        boundary = role["Role"].get("PermissionsBoundary", {}).get("PermissionsBoundaryArn")
        try:
            self._answers["role-policies"] = {
                "Documents": list(self._policies(self._job.role_name)),
                "Boundary": self._managed(boundary) if boundary else None,
            }
        except _RefusedError as refused:
            self._answers["role-policies"] = refused.answer

    def _policies(self, role: str) -> Iterator[Any]:
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
            raise _RefusedError(answer)
        return answer

    def _network(self) -> None:
        job = self._job
        subnets = self._ask("describe-subnets", "ec2", Filters=_filter("subnet-id", job.subnets))
        groups = self._ask(
            "describe-security-groups", "ec2", Filters=_filter("group-id", job.groups)
        )
        existing = [*subnets.get("Subnets", ()), *groups.get("SecurityGroups", ())]
        vpcs = sorted({resource["VpcId"] for resource in existing})
        for command in _OF_VPC:
            key = "Filter" if command == "describe-nat-gateways" else "Filters"
            self._keep(command, "ec2", "", **{key: _filter("vpc-id", vpcs)})
        self._keep("describe-prefix-lists", "ec2")
        for vpc in vpcs:
            for attribute in _ATTRIBUTES:
                subject = f"{attribute}-{vpc}"
                self._keep("describe-vpc-attribute", "ec2", subject, VpcId=vpc, Attribute=attribute)


class _RefusedError(Exception):
    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__()
        self.answer = answer


def _filter(name: str, values: Iterable[str]) -> list[dict[str, Any]]:
    return [{"Name": name, "Values": list(values)}]


def _action(command: str, service: str) -> str:
    """The IAM action that a command requires: ``ec2:DescribeSubnets``."""
    return f"{service.replace('-', '')}:{command.title().replace('-', '')}"


def findings(network: Network) -> Iterator[Finding]:
    """One finding for each denied or failed request, and one for all that the folder lacks."""
    failed: dict[str, list[str]] = {}
    for name, answer in network.answers.items():
        error = answer.get("Error", {})
        action = error.get("Action", name)
        if error.get("Code") in _DENIED:
            yield _denied(network, name, action)
        elif error.get("Code") == _NOT_ANSWERED:
            text = f"not checked, because {action} failed: {error.get('Message')}"
            failed.setdefault(text, []).append(name)
    for text, names in failed.items():
        again = Fix("run doctor again; if it keeps failing, check the network and the proxy")
        yield Finding("not_answered", "unchecked", text, tuple(names), again)
    missing = [name for name in _expected(network) if name not in network.answers]
    if missing:
        yield _not_saved(network.job, missing)


def _expected(network: Network) -> Iterator[str]:
    yield from ("get-caller-identity", "get-role")
    if network.error_code("get-role") is None:
        yield "role-policies"
    yield "list-service-quotas"
    yield from (f"get-bucket-location-{bucket}" for bucket in network.job.buckets)
    yield from _NETWORK if network.job.subnets else ()


def _denied(network: Network, name: str, action: str) -> Finding:
    evidence = [f"{name}: access denied to {network.caller or 'you'}"]
    if name.startswith("get-bucket-location-"):
        evidence.append(
            f"or account {network.job.owner} does not own the bucket (sagemaker.bucket_owner)"
        )
    message = f"permission denied: the check requires {action}"
    return Finding("not_permitted", "unchecked", message, tuple(evidence), _permit(network, action))


def _permit(network: Network, action: str) -> Fix:
    summary = f"grant {action} to the identity that runs doctor"
    arn = r"arn:[^:]+:(?:iam|sts)::\d+:(user|assumed-role)/(.+)"
    match = re.fullmatch(arn, network.caller or "")
    if match is None:
        return Fix(summary)
    is_user, parts = match[1] == "user", match[2].split("/")
    allow = {"Effect": "Allow", "Action": action, "Resource": "*"}
    return network.fix(
        "iam_policy",
        summary,
        kind="user" if is_user else "role",
        principal=parts[-1] if is_user else parts[-2],
        name=f"deploykit-doctor-{action.partition(':')[2]}",
        policy=policy_document([allow]),
    )


def _not_saved(job: Requirements, missing: list[str]) -> Finding:
    network = any(name in _NETWORK for name in missing)
    command = shell.command(*_SAVE, f"sagemaker.region={job.region}")
    return Finding(
        "not_saved",
        "unchecked" if network else "note",
        f"not checked: the folder contains no response for {', '.join(missing)}",
        tuple(f"{name}.json is missing" for name in missing[:3]),
        Fix("save the facts on a machine with AWS credentials", cli=f"{command}\n"),
    )
