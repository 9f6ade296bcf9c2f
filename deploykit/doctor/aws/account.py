"""Checks of the account: the execution role, the buckets, the quota."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploykit.doctor import fixes
from deploykit.doctor.aws import policies
from deploykit.doctor.aws.network import Network, document
from deploykit.doctor.aws.requirements import Requirements
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
    "kms": "the job fails unless the policy of the KMS key allows the role by itself",
    "ssmmessages": "no session can enter the containers (sagemaker.remote_debug)",
}
"""Service -> the consequence if only its actions are missing: the job may well run."""
_REGIONS = {None: "us-east-1", "EU": "eu-west-1"}
"""LocationConstraint of old buckets -> region."""


def findings(network: Network) -> Iterator[Finding]:
    """Problems with the role, the buckets and the quota of instances."""
    yield from _role(network)
    for bucket in network.job.buckets:
        yield from _bucket(network, bucket)
    yield from _quota(network)


def _role(network: Network) -> Iterator[Finding]:
    job, owner = network.job, network.job.role.split(":")[4]
    if network.account is not None and owner != network.account:
        fix = f"log in to account {owner}, or use a role of account {network.account}"
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
                "create it with exactly the permissions that a job requires",
                role=job.role_name,
                trust=_trust([]),
                policy=_policy(_required_actions(job), job),
            ),
        )
    if not network.answered("get-role"):
        return
    trust = document(network.answers["get-role"]["Role"]["AssumeRolePolicyDocument"])
    if not policies.trusts(trust, _SERVICE):
        kept = list(policies.statements(trust))
        summary = f"add {_SERVICE} to the trust policy"
        yield Finding(
            "role_trust",
            "error",
            f"SageMaker cannot assume the role {job.role_name}: it does not trust {_SERVICE}",
            tuple(f"{job.role_name} trusts: {policies.shown(statement)}" for statement in kept),
            network.fix("role-trust", summary, role=job.role_name, trust=_trust(kept)),
        )
    if network.answered("role-policies"):
        yield from _permissions(network)


def _trust(kept: list[Any]) -> dict[str, Any]:
    service = {"Effect": "Allow", "Principal": {"Service": _SERVICE}, "Action": "sts:AssumeRole"}
    return policies.document([*kept, service])


def _required_actions(job: Requirements) -> Actions:
    on_any = [*_BASE_ACTIONS, *(_VPC_ACTIONS if job.subnets else ())]
    on_any += [_SECRET_ACTIONS[kind] for kind in job.secrets if kind in _SECRET_ACTIONS]
    on_any += _SHELL_ACTIONS if job.remote_debug else ()
    required: Actions = []
    for bucket in job.buckets:
        required += policies.bucket_actions(bucket, write=bucket in job.written)
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
        ("denied", "a policy of the role denies it, which overrides any Allow"),
        ("boundary", "the role's permissions boundary does not allow it"),
    ):
        if denied := by_decision.get(decision):
            fix = Fix("remove the actions from the Deny, or add them to the boundary")
            message = f"the role {role} is not allowed {_names(denied)}: {why}"
            yield Finding("role_denied", "error", message, _resources(denied), fix)
    if conditional := by_decision.get("perhaps"):
        message = f"the role {role} is allowed {_names(conditional)} only under conditions"
        fix = Fix("make sure that the conditions hold for this job")
        yield Finding("role_conditions", "warning", message, _resources(conditional), fix)


def _decisions(network: Network) -> dict[str, Actions]:
    """The required actions by the role's policies' decision; ``boundary`` where that forbids."""
    answer = network.answers["role-policies"]
    documents = [document(policy) for policy in answer["Documents"]]
    boundary = [document(answer["Boundary"])] if answer.get("Boundary") else []
    by_decision: dict[str, Actions] = {}
    for action, resource in _required_actions(network.job):
        decision: str = policies.decide(documents, action, resource)
        if boundary and decision != "denied":
            limit = policies.decide(boundary, action, resource)
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
            "iam-policy",
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
    return policies.document(
        {"Effect": "Allow", "Action": sorted(names), "Resource": where}
        for names, where in allowed
        if names
    )


def _bucket(network: Network, bucket: str) -> Iterator[Finding]:
    job, command = network.job, f"get-bucket-location-{bucket}"
    if network.error_code(command) == "NoSuchBucket":
        fix = network.fix("bucket", "create it", bucket=bucket)
        message = f"bucket not found: {bucket}"
        yield Finding("bucket_not_found", "error", message, (f"s3://{bucket}",), fix)
    if not network.answered(command):
        return
    location = network.answers[command].get("LocationConstraint")
    region = _REGIONS.get(location, location)
    if region == job.region:
        return
    fix = Fix(f"copy the data to a bucket in {job.region}: aws s3 sync")
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
        f"the job requests {job.nodes} instances, but the quota is {value}: {job.quota}",
        (f"{code}, {job.quota!r}: {value}",),
        network.fix(
            "quota",
            "request an increase, which can take AWS a few days",
            code=code,
            value=job.nodes,
        ),
    )
