"""Checks of the account: the execution role, the buckets, the quota."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from deploykit.doctor import fixes
from deploykit.doctor.aws import inventory as inventories
from deploykit.doctor.aws import policies
from deploykit.doctor.aws.inventory import Inventory, Role
from deploykit.doctor.aws.requirements import Requirements
from deploykit.lib.finding import Finding, Fix

_SERVICE = "sagemaker.amazonaws.com"
_NOT_FOUND = "NoSuchEntity"
_BASE_ACTIONS = (
    *("ecr:GetAuthorizationToken", "ecr:BatchCheckLayerAvailability"),
    *("ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage"),
    *("logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams"),
    *("logs:PutLogEvents", "cloudwatch:PutMetricData"),
)
_VPC_ACTIONS = tuple(
    f"ec2:{action}"
    for action in (
        *("CreateNetworkInterface", "CreateNetworkInterfacePermission"),
        *("DeleteNetworkInterface", "DeleteNetworkInterfacePermission"),
        *("DescribeNetworkInterfaces", "DescribeVpcs", "DescribeDhcpOptions"),
        *("DescribeSubnets", "DescribeSecurityGroups"),
    )
)
"""Permissions that the execution role of a training job requires:
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-roles.html (CreateTrainingJob)."""
_SHELL_ACTIONS = tuple(
    f"ssmmessages:{action}"
    for action in (
        *("CreateControlChannel", "CreateDataChannel", "OpenControlChannel", "OpenDataChannel"),
    )
)
"""https://docs.aws.amazon.com/sagemaker/latest/dg/train-remote-debugging.html"""
_MILDER = {
    "kms": "the job fails unless the policy of the KMS key allows the role by itself",
    "ssmmessages": "no session can enter the containers (sagemaker.remote_debug)",
}
"""Service -> what follows where only its actions are missing: the job may well run."""
_SECRET_ACTIONS = {"ssm": "ssm:GetParameter", "secretsmanager": "secretsmanager:GetSecretValue"}


def findings(requirements: Requirements, inventory: Inventory) -> Iterator[Finding]:
    """Problems with the role, the buckets and the quota of instances."""
    yield from _role(requirements, inventory)
    for bucket in requirements.buckets:
        yield from _bucket(requirements, inventory, bucket)
    yield from _quota(requirements, inventory)


def _role(requirements: Requirements, inventory: Inventory) -> Iterator[Finding]:
    owner = requirements.role.split(":")[4]
    if inventory.account is not None and owner != inventory.account:
        summary = f"log in to account {owner}, or use a role of account {inventory.account}"
        message = (
            f"the role belongs to account {owner}, but you are logged in to {inventory.account}"
        )
        yield Finding(
            "role_account",
            "error",
            message,
            (requirements.role, str(inventory.caller)),
            Fix(summary),
        )
        return
    if inventories.error_code(inventory.answers, "get-role") == _NOT_FOUND:
        yield _no_role(requirements)
    role = inventories.role(inventory.answers)
    if role is None:
        return
    if not policies.trusts(role.trust, _SERVICE):
        yield _no_trust(requirements, role)
    if role.policies is not None:
        yield from _permissions(requirements, role)


def _no_role(requirements: Requirements) -> Finding:
    return Finding(
        "role_not_found",
        "error",
        f"role not found: {requirements.role_name}",
        (f"sagemaker.role: {requirements.role}",),
        fixes.make(
            "role",
            "create it with exactly the permissions that a job requires",
            **_role_values(requirements),
            trust=_trust([]),
            policy=_document(_required_actions(requirements), requirements),
        ),
    )


def _no_trust(requirements: Requirements, role: Role) -> Finding:
    kept = list(policies.statements(role.trust))
    return Finding(
        "role_trust",
        "error",
        f"SageMaker cannot assume the role {requirements.role_name}: it does not trust {_SERVICE}",
        tuple(f"{requirements.role_name} trusts: {policies.shown(one)}" for one in kept),
        fixes.make(
            "role-trust",
            f"add {_SERVICE} to the trust policy",
            **_role_values(requirements),
            trust=_trust(kept),
        ),
    )


def _trust(kept: list[Any]) -> dict[str, Any]:
    service = {"Effect": "Allow", "Principal": {"Service": _SERVICE}, "Action": "sts:AssumeRole"}
    return {"Version": "2012-10-17", "Statement": [*kept, service]}


def _required_actions(requirements: Requirements) -> list[tuple[str, str | None]]:
    """Actions with the resource each is required on; None if any resource will do."""
    buckets = [
        pair
        for bucket in requirements.buckets
        for pair in policies.bucket_actions(bucket, write=bucket in requirements.written)
    ]
    others = [*_BASE_ACTIONS, *(_VPC_ACTIONS if requirements.subnets else ())]
    others += [_SECRET_ACTIONS[kind] for kind in requirements.secrets if kind in _SECRET_ACTIONS]
    others += _SHELL_ACTIONS if requirements.remote_debug else ()
    on_keys = [
        (action, None if key == "*" else key)
        for key, actions in requirements.keys
        for action in actions
    ]
    return [*buckets, *((action, None) for action in others), *on_keys]


def _permissions(requirements: Requirements, role: Role) -> Iterator[Finding]:
    by_decision: dict[str, list[tuple[str, str | None]]] = {}
    for action, resource in _required_actions(requirements):
        decision: str = policies.decide(role.policies or (), action, resource)
        if role.boundary is not None and decision != "denied":
            limited = policies.decide([role.boundary], action, resource)
            decision = "boundary" if limited in {"denied", "absent"} else decision
        by_decision.setdefault(decision, []).append((action, resource))
    missing = by_decision.pop("absent", [])
    for service, consequence in _MILDER.items():
        milder = [pair for pair in missing if pair[0].startswith(f"{service}:")]
        missing = [pair for pair in missing if pair not in milder]
        if milder:
            yield _missing_permissions(requirements, milder, f"-{service}", consequence)
    if missing:
        yield _missing_permissions(requirements, missing)
    for decision, why in (
        ("denied", "a policy of the role denies it, which overrides any Allow"),
        ("boundary", "the role's permissions boundary does not allow it"),
    ):
        if denied := by_decision.get(decision):
            fix = Fix("remove the actions from the Deny, or add them to the boundary")
            message = f"the role {requirements.role_name} is not allowed {_names(denied)}: {why}"
            yield Finding("role_denied", "error", message, _resources(denied), fix)
    if limited_to := by_decision.get("perhaps"):
        names = _names(limited_to)
        message = f"the role {requirements.role_name} is allowed {names} only under conditions"
        fix = Fix("make sure that the conditions hold for this job")
        yield Finding("role_conditions", "warning", message, _resources(limited_to), fix)


def _missing_permissions(
    requirements: Requirements,
    missing: list[tuple[str, str | None]],
    name: str = "",
    consequence: str = "",
) -> Finding:
    message = f"the role {requirements.role_name} lacks permissions: {_names(missing)}"
    return Finding(
        f"role_permissions{name.replace('-', '_')}",
        "warning" if consequence else "error",
        f"{message}; {consequence}" if consequence else message,
        _resources(missing),
        fixes.make(
            "iam-policy",
            "allow exactly these actions",
            kind="role",
            principal=requirements.role_name,
            name=f"deploykit-training{name}",
            policy=_document(missing, requirements),
        ),
    )


def _names(actions: list[tuple[str, str | None]]) -> str:
    return ", ".join(dict.fromkeys(action for action, _ in actions))


def _resources(actions: list[tuple[str, str | None]]) -> tuple[str, ...]:
    """Evidence: where each action is required, rather than all policies that were read."""
    lines = (f"{action} on {resource}" for action, resource in actions if resource)
    return tuple(lines) or ("no attached or inline policy of the role allows them",)


def _document(actions: list[tuple[str, str | None]], requirements: Requirements) -> dict[str, Any]:
    """A policy that allows `actions`: S3 on the job's buckets, KMS on its keys, others on any."""
    storage = {action for action, _ in actions if action.startswith("s3:")}
    arns = [f"arn:aws:s3:::{bucket}{end}" for bucket in requirements.buckets for end in ("", "/*")]
    by_key: dict[str, set[str]] = {}
    others = set()
    for action, resource in actions:
        if action.startswith("kms:") and resource:
            by_key.setdefault(resource, set()).add(action)
        elif action not in storage:
            others.add(action)
    kept = [
        {"Effect": "Allow", "Action": sorted(names), "Resource": where}
        for names, where in ((storage, arns), (others, "*"), *((by_key[k], k) for k in by_key))
        if names
    ]
    return {"Version": "2012-10-17", "Statement": kept}


def _role_values(requirements: Requirements) -> dict[str, str]:
    return {"role": requirements.role_name}


def _bucket(requirements: Requirements, inventory: Inventory, bucket: str) -> Iterator[Finding]:
    name = f"get-bucket-location-{bucket}"
    if inventories.error_code(inventory.answers, name) == "NoSuchBucket":
        yield Finding(
            "bucket_not_found",
            "error",
            f"bucket not found: {bucket}",
            (f"s3://{bucket}",),
            fixes.make("bucket", "create it", region=requirements.region, bucket=bucket),
        )
    answer = inventory.answers.get(name, {"Error": {}})
    if "Error" in answer:
        return
    region = {None: "us-east-1", "EU": "eu-west-1"}.get(
        answer.get("LocationConstraint"), answer.get("LocationConstraint")
    )
    if region != requirements.region:
        yield _other_region(requirements, bucket, str(region))


def _other_region(requirements: Requirements, bucket: str, region: str) -> Finding:
    message = f"the bucket {bucket} is in {region}, but the job runs in {requirements.region}"
    local_name = f"{bucket}-{requirements.region}"
    if bucket not in requirements.written:
        fix = Fix(f"copy the data to a bucket in {requirements.region}: aws s3 sync")
    else:
        fix = fixes.make(
            "bucket",
            f"create a bucket in {requirements.region}, and set sagemaker.bucket",
            {"sagemaker.bucket": local_name},
            region=requirements.region,
            bucket=local_name,
        )
    return Finding(
        "bucket_region", "error", message, (f"{bucket}: LocationConstraint {region}",), fix
    )


def _quota(requirements: Requirements, inventory: Inventory) -> Iterator[Finding]:
    quota = inventories.quota(inventory.answers, requirements.quota)
    if quota is None or quota.value >= requirements.nodes:
        return
    yield Finding(
        "quota",
        "error",
        f"the job requests {requirements.nodes} instances, but the quota is {quota.value:g}: "
        f"{requirements.quota}",
        (f"{quota.code}, {requirements.quota!r}: {quota.value:g}",),
        fixes.make(
            "quota",
            "request an increase, which can take AWS a few days",
            region=requirements.region,
            code=quota.code,
            value=math.ceil(requirements.nodes),
        ),
    )
