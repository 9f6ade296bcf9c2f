"""The account of a job: its role, its buckets, and how many machines it may have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from deploykit.doctor import fixes
from deploykit.doctor.aws import facts as reading
from deploykit.doctor.aws import policies
from deploykit.doctor.aws.facts import Facts, Role
from deploykit.doctor.aws.needs import Needs
from deploykit.doctor.finding import Finding, Fix

_SERVICE = "sagemaker.amazonaws.com"
_ABSENT = "NoSuchEntity"
_ALWAYS = (
    *("ecr:GetAuthorizationToken", "ecr:BatchCheckLayerAvailability"),
    *("ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage"),
    *("logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams"),
    *("logs:PutLogEvents", "cloudwatch:PutMetricData"),
)
_IN_VPC = tuple(
    f"ec2:{action}"
    for action in (
        *("CreateNetworkInterface", "CreateNetworkInterfacePermission"),
        *("DeleteNetworkInterface", "DeleteNetworkInterfacePermission"),
        *("DescribeNetworkInterfaces", "DescribeVpcs", "DescribeDhcpOptions"),
        *("DescribeSubnets", "DescribeSecurityGroups"),
    )
)
"""What the execution role of a training job needs:
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-roles.html (CreateTrainingJob)."""
_SECRETS = {"ssm": "ssm:GetParameter", "secretsmanager": "secretsmanager:GetSecretValue"}


def check(needs: Needs, facts: Facts) -> Iterator[Finding]:
    yield from _role(needs, facts)
    for bucket in needs.buckets:
        yield from _bucket(needs, facts, bucket)
    yield from _quota(needs, facts)


def _role(needs: Needs, facts: Facts) -> Iterator[Finding]:
    owner = needs.role.split(":")[4]
    if facts.account is not None and owner != facts.account:
        say = f"log in to account {owner}, or name a role of {facts.account}"
        message = f"the role belongs to account {owner}, and you are in {facts.account}"
        yield Finding("role_account", "error", message, (needs.role, str(facts.caller)), Fix(say))
        return
    if reading.failed(facts.answers, "get-role") == _ABSENT:
        yield _no_role(needs)
    role = reading.role(facts.answers)
    if role is None:
        return
    if not policies.trusts(role.trust, _SERVICE):
        yield _no_trust(needs, role)
    if role.policies is not None:
        yield from _permissions(needs, role)


def _no_role(needs: Needs) -> Finding:
    return Finding(
        "role_absent",
        "error",
        f"there is no role {needs.role_name}",
        (f"sagemaker.role: {needs.role}",),
        fixes.make(
            "role",
            "make it, with what a job needs and no more",
            **_role_values(needs),
            trust=_trust([]),
            policy=_document([need for need, _ in _wanted(needs)], needs),
        ),
    )


def _no_trust(needs: Needs, role: Role) -> Finding:
    kept = list(policies.statements(role.trust))
    return Finding(
        "role_trust",
        "error",
        f"SageMaker may not take on the role {needs.role_name}: {_SERVICE} is not trusted",
        tuple(f"{needs.role_name} trusts: {policies.shown(one)}" for one in kept),
        fixes.make(
            "role-trust", f"trust {_SERVICE} too", **_role_values(needs), trust=_trust(kept)
        ),
    )


def _trust(kept: list[Any]) -> dict[str, Any]:
    ours = {"Effect": "Allow", "Principal": {"Service": _SERVICE}, "Action": "sts:AssumeRole"}
    return {"Version": "2012-10-17", "Statement": [*kept, ours]}


def _wanted(needs: Needs) -> list[tuple[str, str | None]]:
    """Actions, each with the resource it is needed on, or None for whatever it acts on."""
    buckets = [
        pair
        for bucket in needs.buckets
        for pair in policies.bucket_actions(bucket, write=bucket in needs.written)
    ]
    others = [*_ALWAYS, *(_IN_VPC if needs.subnets else ())]
    others += [_SECRETS[kind] for kind in needs.secrets if kind in _SECRETS]
    return [*buckets, *((action, None) for action in others)]


def _permissions(needs: Needs, role: Role) -> Iterator[Finding]:
    found: dict[str, list[tuple[str, str | None]]] = {}
    for action, resource in _wanted(needs):
        said = policies.decide(role.policies or (), action, resource)
        if role.boundary is not None and said != "denied":
            limited = policies.decide([role.boundary], action, resource)
            said = "boundary" if limited in {"denied", "absent"} else said  # type: ignore[assignment]
        found.setdefault(said, []).append((action, resource))
    if lost := found.get("absent"):
        yield _lacks(needs, lost)
    for said, why in (
        ("denied", "a policy of the role denies them, whatever others allow"),
        ("boundary", "the role's permissions boundary does not let them through"),
    ):
        if lost := found.get(said):
            say = "take them out of the Deny, or of the boundary"
            message = f"the role {needs.role_name} may not do {_named(lost)}: {why}"
            yield Finding("role_denied", "error", message, _places(lost), Fix(say))
    if lost := found.get("perhaps"):
        message = f"the role {needs.role_name} may do {_named(lost)} under conditions only"
        say = "see that the conditions hold for this job"
        yield Finding("role_conditions", "warning", message, _places(lost), Fix(say))


def _lacks(needs: Needs, lost: list[tuple[str, str | None]]) -> Finding:
    return Finding(
        "role_permissions",
        "error",
        f"the role {needs.role_name} may not do {_named(lost)}",
        _places(lost),
        fixes.make(
            "role-policy",
            "allow exactly these",
            **_role_values(needs),
            name="deploykit-training",
            policy=_document([action for action, _ in lost], needs),
        ),
    )


def _named(lost: list[tuple[str, str | None]]) -> str:
    return ", ".join(dict.fromkeys(action for action, _ in lost))


def _places(lost: list[tuple[str, str | None]]) -> tuple[str, ...]:
    """Which policies were read is many lines; where an action is needed is what helps."""
    found = (f"{action} on {resource}" for action, resource in lost if resource)
    return tuple(found) or ("no attached or inline policy of the role allows them",)


def _document(actions: list[str], needs: Needs) -> dict[str, Any]:
    """A policy for `actions`: those on S3 for the job's buckets, the others for everything."""
    storage = sorted({action for action in actions if action.startswith("s3:")})
    others = sorted(set(actions) - set(storage))
    arns = [f"arn:aws:s3:::{bucket}{end}" for bucket in needs.buckets for end in ("", "/*")]
    kept = [
        {"Effect": "Allow", "Action": names, "Resource": where}
        for names, where in ((storage, arns), (others, "*"))
        if names
    ]
    return {"Version": "2012-10-17", "Statement": kept}


def _role_values(needs: Needs) -> dict[str, str]:
    return {"role": needs.role_name}


def _bucket(needs: Needs, facts: Facts, bucket: str) -> Iterator[Finding]:
    name = f"get-bucket-location-{bucket}"
    if reading.failed(facts.answers, name) == "NoSuchBucket":
        yield Finding(
            "bucket_absent",
            "error",
            f"there is no bucket {bucket}",
            (f"s3://{bucket}",),
            fixes.make("bucket", "make it", region=needs.region, bucket=bucket),
        )
    answer = facts.answers.get(name, {"Error": {}})
    if "Error" in answer:
        return
    where = {None: "us-east-1", "EU": "eu-west-1"}.get(
        answer.get("LocationConstraint"), answer.get("LocationConstraint")
    )
    if where != needs.region:
        yield _elsewhere(needs, bucket, str(where))


def _elsewhere(needs: Needs, bucket: str, where: str) -> Finding:
    message = f"the bucket {bucket} lies in {where}, and the job runs in {needs.region}"
    nearer = f"{bucket}-{needs.region}"
    if bucket not in needs.written:
        fix = Fix(f"copy the data to a bucket in {needs.region}: aws s3 sync")
    else:
        fix = fixes.make(
            "bucket",
            f"make a bucket in {needs.region}, and name it",
            {"sagemaker.bucket": nearer},
            region=needs.region,
            bucket=nearer,
        )
    return Finding(
        "bucket_region", "error", message, (f"{bucket}: LocationConstraint {where}",), fix
    )


def _quota(needs: Needs, facts: Facts) -> Iterator[Finding]:
    quota = reading.quota(facts.answers, needs.quota)
    if quota is None or quota.value >= needs.nodes:
        return
    yield Finding(
        "quota",
        "error",
        f"your quota of {needs.quota} is {quota.value:g}, and the job asks for {needs.nodes}",
        (f"{quota.code}, {needs.quota!r}: {quota.value:g}",),
        fixes.make(
            "quota",
            "ask for more; AWS answers within days",
            region=needs.region,
            code=quota.code,
            value=math.ceil(needs.nodes),
        ),
    )
