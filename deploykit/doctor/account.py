"""Checks of the account: the execution role, the buckets, the quota; and what IAM policies allow.

Conditions are not evaluated: an Allow with a condition counts as "perhaps", and a Deny with a
condition is ignored. `iam:SimulatePrincipalPolicy` would need a further permission, would not cover
the policy of an endpoint, and could not be answered from saved facts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from deploykit.doctor import fixes
from deploykit.doctor.network import Network, document
from deploykit.doctor.requirements import Requirements
from deploykit.lib.finding import Finding, Fix

Actions = list[tuple[str, str | None]]
"""IAM actions with the resource on which each is required; None if any resource will do."""

_SERVICE = "sagemaker.amazonaws.com"
_BASE_ACTIONS = (
    *("ecr:GetAuthorizationToken", "ecr:BatchCheckLayerAvailability"),
    *("ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage"),
    *("logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams"),
    *("logs:PutLogEvents", "cloudwatch:PutMetricData"),
)
_VPC_ACTIONS = (
    *("ec2:CreateNetworkInterface", "ec2:CreateNetworkInterfacePermission"),
    *("ec2:DeleteNetworkInterface", "ec2:DeleteNetworkInterfacePermission"),
    *("ec2:DescribeNetworkInterfaces", "ec2:DescribeVpcs", "ec2:DescribeDhcpOptions"),
    *("ec2:DescribeSubnets", "ec2:DescribeSecurityGroups"),
)
"""Permissions that the execution role of a training job requires:
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-roles.html (CreateTrainingJob)."""
_SHELL_ACTIONS = (
    *("ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel"),
    *("ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel"),
)
"""https://docs.aws.amazon.com/sagemaker/latest/dg/train-remote-debugging.html"""
_SECRET_ACTIONS = {"ssm": "ssm:GetParameter", "secretsmanager": "secretsmanager:GetSecretValue"}
_OPTIONAL_SERVICES = {
    "kms": "the job fails unless the KMS key's own policy grants access to the role",
    "ssmmessages": "sessions in the containers (sagemaker.remote_debug) cannot be opened",
}
"""Service -> the consequence if only its actions are missing: the job may well run."""
_REGIONS = {None: "us-east-1", "EU": "eu-west-1"}
"""LocationConstraint of old buckets -> region."""


def findings(network: Network) -> Iterator[Finding]:
    yield from _role(network)
    for bucket in network.job.buckets:
        yield from _bucket(network, bucket)
    yield from _quota(network)


def _role(network: Network) -> Iterator[Finding]:
    job, owner = network.job, network.job.role.split(":")[4]
    if network.account is not None and owner != network.account:
        fix = f"log in to account {owner}, or use a role in account {network.account}"
        yield Finding(
            "role_account",
            "error",
            f"the role belongs to account {owner}, but you are logged in to {network.account}",
            (job.role, str(network.caller)),
            Fix(fix),
        )
        return
    if network.error_code("get-role") == "NoSuchEntity":
        yield Finding(
            "role_not_found",
            "error",
            f"role not found: {job.role_name}",
            (f"sagemaker.role: {job.role}",),
            network.fix(
                "role",
                "create the role with exactly the permissions that a job requires",
                role=job.role_name,
                trust=_trust([]),
                policy=_policy(_required_actions(job), job),
            ),
        )
    if not network.answered("get-role"):
        return
    trust = document(network.answers["get-role"]["Role"]["AssumeRolePolicyDocument"])
    if not trusts(trust, _SERVICE):
        kept = list(statements(trust))
        summary = f"add {_SERVICE} to the trust policy"
        yield Finding(
            "role_trust",
            "error",
            f"SageMaker cannot assume the role {job.role_name}: it does not trust {_SERVICE}",
            tuple(f"{job.role_name} trusts: {json.dumps(statement)}" for statement in kept),
            network.fix("role_trust", summary, role=job.role_name, trust=_trust(kept)),
        )
    if network.answered("role-policies"):
        yield from _permissions(network)


def _trust(kept: list[Any]) -> dict[str, Any]:
    service = {"Effect": "Allow", "Principal": {"Service": _SERVICE}, "Action": "sts:AssumeRole"}
    return policy_document([*kept, service])


def _required_actions(job: Requirements) -> Actions:
    on_any = [*_BASE_ACTIONS, *(_VPC_ACTIONS if job.subnets else ())]
    on_any += [_SECRET_ACTIONS[kind] for kind in job.secrets if kind in _SECRET_ACTIONS]
    on_any += _SHELL_ACTIONS if job.remote_debug else ()
    required: Actions = []
    for bucket in job.buckets:
        required += bucket_actions(bucket, write=bucket in job.written)
    required += [(action, None) for action in on_any]
    for key, actions in job.keys:
        required += [(action, None if key == "*" else key) for action in actions]
    return required


def _permissions(network: Network) -> Iterator[Finding]:
    role = network.job.role_name
    by_decision = _decisions(network)
    missing = by_decision.get("absent", [])
    for service, consequence in _OPTIONAL_SERVICES.items():
        optional = [pair for pair in missing if pair[0].startswith(f"{service}:")]
        missing = [pair for pair in missing if pair not in optional]
        if optional:
            yield _missing_permissions(network, optional, f"_{service}", consequence)
    if missing:
        yield _missing_permissions(network, missing)
    for decision, why in (
        ("denied", "a policy of the role explicitly denies this, which overrides any Allow"),
        ("boundary", "the role's permissions boundary does not allow this"),
    ):
        if denied := by_decision.get(decision):
            fix = Fix("remove the actions from the Deny statement, or add them to the boundary")
            message = f"the role {role} is not allowed to use {_names(denied)}: {why}"
            yield Finding("role_denied", "error", message, _resources(denied), fix)
    if conditional := by_decision.get("perhaps"):
        message = f"the role {role} is allowed to use {_names(conditional)} only conditionally"
        fix = Fix("check that this job meets the conditions")
        yield Finding("role_conditions", "warning", message, _resources(conditional), fix)


def _decisions(network: Network) -> dict[str, Actions]:
    """The required actions by the role's policies' decision; ``boundary`` where that forbids."""
    answer = network.answers["role-policies"]
    documents = [document(policy) for policy in answer["Documents"]]
    boundary = [document(answer["Boundary"])] if answer.get("Boundary") else []
    by_decision: dict[str, Actions] = {}
    for action, resource in _required_actions(network.job):
        decision: str = decide(documents, action, resource)
        if boundary and decision != "denied":
            limit = decide(boundary, action, resource)
            decision = "boundary" if limit in {"denied", "absent"} else decision
        by_decision.setdefault(decision, []).append((action, resource))
    return by_decision


def _missing_permissions(
    network: Network, missing: Actions, suffix: str = "", consequence: str = ""
) -> Finding:
    job = network.job
    message = f"the role {job.role_name} lacks permissions: {_names(missing)}"
    return Finding(
        f"role_permissions{suffix}",
        "warning" if consequence else "error",
        f"{message}; {consequence}" if consequence else message,
        _resources(missing),
        network.fix(
            "iam_policy",
            "allow exactly these actions",
            kind="role",
            principal=job.role_name,
            name=f"deploykit-training{suffix.replace('_', '-')}",
            policy=_policy(missing, job),
        ),
    )


def _names(actions: Actions) -> str:
    return ", ".join(dict.fromkeys(action for action, _ in actions))


def _resources(actions: Actions) -> tuple[str, ...]:
    """Evidence: where each action is required, rather than all policies that were read."""
    lines = (f"{action} on {resource}" for action, resource in actions if resource)
    return tuple(lines) or ("no attached or inline policy of the role allows them",)


def _policy(actions: Actions, job: Requirements) -> dict[str, Any]:
    """A policy that allows `actions`: S3 on the job's buckets, KMS on its keys, others on any."""
    buckets = [f"arn:aws:s3:::{bucket}{end}" for bucket in job.buckets for end in ("", "/*")]
    storage, others = set(), set()
    by_key: dict[str, set[str]] = {}
    for action, resource in actions:
        if action.startswith("s3:"):
            storage.add(action)
        elif action.startswith("kms:") and resource:
            by_key.setdefault(resource, set()).add(action)
        else:
            others.add(action)
    allowed = ((storage, buckets), (others, "*"), *((names, key) for key, names in by_key.items()))
    return policy_document(
        {"Effect": "Allow", "Action": sorted(names), "Resource": where}
        for names, where in allowed
        if names
    )


def _bucket(network: Network, bucket: str) -> Iterator[Finding]:
    job, command = network.job, f"get-bucket-location-{bucket}"
    if network.error_code(command) == "NoSuchBucket":
        fix = network.fix("bucket", "create the bucket", bucket=bucket)
        message = f"bucket not found: {bucket}"
        yield Finding("bucket_not_found", "error", message, (f"s3://{bucket}",), fix)
    if not network.answered(command):
        return
    location = network.answers[command].get("LocationConstraint")
    region = _REGIONS.get(location, location)
    if region == job.region:
        return
    fix = Fix(f"copy the data to a bucket in {job.region} with `aws s3 sync`")
    if bucket in job.written:
        local = f"{bucket}-{job.region}"
        summary = f"create a bucket in {job.region}, and set sagemaker.bucket"
        settings = {"sagemaker.bucket": local}
        fix = fixes.make("bucket", summary, settings, region=job.region, bucket=local)
    message = f"the bucket {bucket} is in {region}, but the job runs in {job.region}"
    evidence = (f"{bucket}: LocationConstraint {region}",)
    yield Finding("bucket_region", "error", message, evidence, fix)


def _quota(network: Network) -> Iterator[Finding]:
    job = network.job
    quotas = network.answers.get("list-service-quotas", {}).get("Quotas", ())
    quota = next((quota for quota in quotas if quota.get("QuotaName") == job.quota), None)
    if quota is None or quota["Value"] >= job.nodes:
        return
    code, value = quota["QuotaCode"], f"{quota['Value']:g}"
    yield Finding(
        "quota",
        "error",
        f"the job requests {job.nodes} instances, but the quota {job.quota!r} is {value}",
        (f"{code}, {job.quota!r}: {value}",),
        network.fix(
            "quota",
            "request an increase, which can take a few days",
            code=code,
            value=job.nodes,
        ),
    )


Decision = Literal["allowed", "perhaps", "denied", "absent"]
Policy = Mapping[str, Any]


def bucket_actions(bucket: str, *, write: bool = True) -> list[tuple[str, str]]:
    """The actions of a job on a bucket, each with its resource."""
    arn = f"arn:aws:s3:::{bucket}"
    reads = [("s3:ListBucket", arn), ("s3:GetObject", f"{arn}/*")]
    return [*reads, ("s3:PutObject", f"{arn}/*")] if write else reads


def allow_bucket(bucket: str) -> dict[str, Any]:
    arn = f"arn:aws:s3:::{bucket}"
    actions = [action for action, _ in bucket_actions(bucket)]
    return {"Effect": "Allow", "Action": actions, "Resource": [arn, f"{arn}/*"]}


def policy_document(statements: Iterable[Policy]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def decide(policies: Iterable[Policy], action: str, resource: str | None) -> Decision:
    """Evaluate all policies together. If `resource` is None, any allowed resource counts."""
    decision: Decision = "absent"
    for statement in itertools.chain.from_iterable(map(statements, policies)):
        if denies(statement, action, resource):
            return "denied"
        if statement.get("Effect") == "Allow" and _matches_statement(statement, action, resource):
            if not statement.get("Condition"):
                decision = "allowed"
            elif decision == "absent":
                decision = "perhaps"
    return decision


def denies(statement: Policy, action: str, resource: str | None) -> bool:
    """Whether a statement denies unconditionally; if `resource` is None, on every resource."""
    if statement.get("Effect") != "Deny" or statement.get("Condition"):
        return False
    if resource is None and "*" not in _listed(statement.get("Resource", ())):
        return False
    return _matches_statement(statement, action, resource)


def statements(policy: Policy) -> Iterator[Policy]:
    """The statements of a policy document, which may hold one alone instead of a list."""
    listed = policy.get("Statement", ())
    yield from [listed] if isinstance(listed, Mapping) else listed


def trusts(policy: Policy, service: str) -> bool:
    """Whether a trust policy allows a service to assume the role."""
    return any(
        statement.get("Effect") == "Allow"
        and _matches_statement(statement, "sts:AssumeRole", None)
        and service in _listed(dict(statement.get("Principal", {})).get("Service", ()))
        for statement in statements(policy)
        if isinstance(statement.get("Principal"), Mapping)
    )


def _matches_statement(statement: Policy, action: str, resource: str | None) -> bool:
    if "NotAction" in statement:
        acts = not _matches(statement["NotAction"], action, flags=re.IGNORECASE)
    else:
        acts = _matches(statement.get("Action", ()), action, flags=re.IGNORECASE)
    if not acts or resource is None:
        return acts
    if "NotResource" in statement:
        return not _matches(statement["NotResource"], resource)
    return _matches(statement.get("Resource", "*"), resource)


def _matches(patterns: Any, text: str, flags: int = 0) -> bool:
    """Whether a pattern with ``*`` and ``?`` matches; `fnmatch` would also read ``[...]``."""
    regexes = (re.escape(p).replace(r"\*", ".*").replace(r"\?", ".") for p in _listed(patterns))
    return any(re.fullmatch(regex, text, flags) for regex in regexes)


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
