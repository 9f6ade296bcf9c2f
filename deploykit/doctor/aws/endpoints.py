"""Checks of VPC endpoints, which replace internet access: existence, DNS, groups, policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploykit.doctor import fixes
from deploykit.doctor.aws import policies, routes, security_groups
from deploykit.doctor.aws.inventory import Endpoint, Inventory, SecurityGroup, Subnet, Vpc
from deploykit.doctor.aws.requirements import Requirements
from deploykit.lib.finding import Finding, Fix

_COMMON_SERVICES = ("ecr.api", "ecr.dkr", "logs", "sagemaker.api", "sts")
"""Services that a training script may call. SageMaker itself pulls the image and writes the logs
outside the VPC: https://docs.aws.amazon.com/sagemaker/latest/dg/train-vpc.html."""


def findings(requirements: Requirements, inventory: Inventory) -> Iterator[Finding]:
    """Problems with the endpoints and the DNS attributes of the job's VPC."""
    if inventory.endpoints is None or inventory.tables is None or inventory.nats is None:
        return
    job_subnets = routes.subnets_of_job(requirements, inventory)
    for vpc in sorted({subnet.vpc for subnet in job_subnets}):
        subnets = [subnet for subnet in job_subnets if subnet.vpc == vpc]
        yield from _dns(requirements, inventory, vpc)
        yield from _policies(requirements, inventory, subnets)
        if _is_isolated(inventory, subnets):
            yield from _interface_endpoints(requirements, inventory, subnets)


def _job_groups(requirements: Requirements, inventory: Inventory, vpc: str) -> list[SecurityGroup]:
    """The job's security groups that exist in `vpc`."""
    known = inventory.groups or {}
    existing = [known[name] for name in requirements.groups if name in known]
    return [group for group in existing if group.vpc == vpc]


def _is_isolated(inventory: Inventory, subnets: list[Subnet]) -> bool:
    """Whether no subnet has a default route to the internet for instances without public IPs."""
    tables = (routes.table_of(inventory, subnet.id) for subnet in subnets)
    default_routes = [routes.default_route(table) for table in tables if table is not None]
    return all(route is None or route.target.startswith("igw-") for route in default_routes)


def _dns(requirements: Requirements, inventory: Inventory, vpc: str) -> Iterator[Finding]:
    found_vpc = (inventory.vpcs or {}).get(vpc)
    if found_vpc is None:
        return
    if found_vpc.dns_support is False:
        yield _attribute(
            requirements,
            found_vpc,
            "enableDnsSupport",
            "DNS is off in the VPC: no host name resolves, not even S3's",
        )
    private = [one for one in inventory.endpoints or () if one.vpc == vpc and not one.gateway]
    if found_vpc.dns_hostnames is False and any(one.private_dns for one in private):
        yield _attribute(
            requirements,
            found_vpc,
            "enableDnsHostnames",
            "the names of AWS services do not resolve to the VPC's endpoints",
        )


def _attribute(requirements: Requirements, vpc: Vpc, attribute: str, message: str) -> Finding:
    return Finding(
        "vpc_dns",
        "error",
        message,
        (f"{vpc.id}: {attribute} is false",),
        fixes.make(
            "vpc-dns",
            f"turn on {attribute}",
            region=requirements.region,
            vpc=vpc.id,
            block=str(vpc.blocks[0]),
            option="--enable-dns-support" if "Support" in attribute else "--enable-dns-hostnames",
        ),
    )


def _interface_endpoints(
    requirements: Requirements, inventory: Inventory, subnets: list[Subnet]
) -> Iterator[Finding]:
    existing = {
        one.service: one for one in inventory.endpoints or () if _serves(one, subnets[0].vpc)
    }
    services = [*_COMMON_SERVICES, *requirements.secrets]
    missing = [name for name in services if name not in existing]
    if missing:
        yield _missing(requirements, inventory, subnets, missing)
    for name in services:
        if name in existing:
            yield from _interface_endpoint(requirements, inventory, subnets, existing[name])


def _serves(endpoint: Endpoint, vpc: str) -> bool:
    return endpoint.vpc == vpc and not endpoint.gateway and endpoint.works


def _severity(requirements: Requirements, names: list[str]) -> Any:
    return "error" if set(requirements.secrets).intersection(names) else "warning"


def _missing(
    requirements: Requirements, inventory: Inventory, subnets: list[Subnet], missing: list[str]
) -> Finding:
    secret_services = ", ".join(name for name in missing if name in requirements.secrets)
    impact = (
        f"The job's secrets cannot be read without {secret_services}."
        if secret_services
        else (
            "Connections that the script opens (pip, downloads, trackers, these services) hang "
            "until they time out; training itself needs only S3."
        )
    )
    groups = _job_groups(requirements, inventory, subnets[0].vpc)
    return Finding(
        "no_endpoint",
        _severity(requirements, missing),
        f"the subnets have no internet access, and the VPC has no endpoint for "
        f"{', '.join(missing)}. {impact}",
        tuple(_default_route(inventory, subnet) for subnet in subnets),
        fixes.make(
            "endpoints",
            "create the endpoints (billed by the hour), or route 0.0.0.0/0 to a NAT gateway",
            region=requirements.region,
            vpc=subnets[0].vpc,
            services=missing,
            subnets=_one_per_zone(subnets),
            groups=(chosen := _endpoint_groups(inventory, groups, subnets)),
            inside=[
                group.id
                for group in groups
                if group.id in chosen and not _admits_itself(group, subnets)
            ],
        ),
    )


def _default_route(inventory: Inventory, subnet: Subnet) -> str:
    table = routes.table_of(inventory, subnet.id)
    route = routes.default_route(table) if table else None
    name = table.id if table else "no route table"
    if route is None:
        return f"{subnet.id}, {name}: no route to 0.0.0.0/0"
    return f"{subnet.id}, {name}: 0.0.0.0/0 -> {route.target}, for public addresses only"


def _one_per_zone(subnets: list[Subnet]) -> list[str]:
    """An endpoint accepts one subnet of each zone."""
    return list({subnet.zone: subnet.id for subnet in reversed(subnets)}.values())


def _endpoint_groups(
    inventory: Inventory, groups: list[SecurityGroup], subnets: list[Subnet]
) -> list[str]:
    """The groups of an existing endpoint that admits the job, else the job's own groups."""
    members = {group.id for group in groups}
    known = inventory.groups or {}
    for one in inventory.endpoints or ():
        endpoint_groups = [known[name] for name in one.groups if name in known]
        if (
            one.vpc == subnets[0].vpc
            and endpoint_groups
            and _admits(endpoint_groups, members, subnets)
        ):
            return [group.id for group in endpoint_groups]
    return sorted(members)


def _admits(endpoint_groups: list[SecurityGroup], members: set[str], subnets: list[Subnet]) -> bool:
    return all(
        security_groups.admit_https(endpoint_groups, members, subnet.block) for subnet in subnets
    )


def _admits_itself(group: SecurityGroup, subnets: list[Subnet]) -> bool:
    return _admits([group], {group.id}, subnets)


def _interface_endpoint(
    requirements: Requirements, inventory: Inventory, subnets: list[Subnet], endpoint: Endpoint
) -> Iterator[Finding]:
    known = inventory.groups or {}
    endpoint_groups = [known[name] for name in endpoint.groups if name in known]
    members = {group.id for group in _job_groups(requirements, inventory, endpoint.vpc)}
    if not endpoint.private_dns:
        yield _private_dns_off(requirements, endpoint)
    if inventory.groups is not None and members and not _admits(endpoint_groups, members, subnets):
        yield _blocked(requirements, endpoint, endpoint_groups, min(members))


def _private_dns_off(requirements: Requirements, endpoint: Endpoint) -> Finding:
    return Finding(
        "endpoint_dns",
        _severity(requirements, [endpoint.service]),
        f"private DNS is off: the name of {endpoint.service} does not resolve to its endpoint",
        (f"{endpoint.id}: PrivateDnsEnabled is false",),
        fixes.make(
            "endpoint-dns",
            "turn on private DNS",
            region=requirements.region,
            vpc=endpoint.vpc,
            endpoint=endpoint.id,
            service=endpoint.service,
            subnets=list(endpoint.subnets),
            groups=list(endpoint.groups),
        ),
    )


def _blocked(
    requirements: Requirements,
    endpoint: Endpoint,
    endpoint_groups: list[SecurityGroup],
    member: str,
) -> Finding:
    permission = {
        "IpProtocol": "tcp",
        "FromPort": 443,
        "ToPort": 443,
        "UserIdGroupPairs": [{"GroupId": member}],
    }
    evidence = [f"{endpoint.id}: {', '.join(endpoint.groups)}"]
    evidence += [
        f"{group.id} inbound: {'; '.join(map(str, group.inbound)) or 'no rules'}"
        for group in endpoint_groups
    ]
    return Finding(
        "endpoint_blocked",
        _severity(requirements, [endpoint.service]),
        f"the endpoint for {endpoint.service} does not allow tcp 443 from the job",
        tuple(evidence),
        fixes.make(
            "group-rule",
            f"allow tcp 443 from {member}",
            region=requirements.region,
            group=endpoint.groups[0] if endpoint.groups else member,
            outbound=False,
            permissions=[permission],
        ),
    )


def _policies(
    requirements: Requirements, inventory: Inventory, subnets: list[Subnet]
) -> Iterator[Finding]:
    """Actions on the job's buckets that the policy of the S3 gateway endpoint does not allow."""
    tables = (routes.table_of(inventory, subnet.id) for subnet in subnets)
    gateways = (routes.gateway(inventory, table) for table in tables if table is not None)
    for endpoint in {one.id: one for one in gateways if one is not None}.values():
        refused_by_bucket = {
            bucket: refused
            for bucket in requirements.buckets
            if (refused := _refused(requirements, endpoint, bucket))
        }
        if refused_by_bucket:
            yield _policy_finding(requirements, endpoint, refused_by_bucket)


def _refused(requirements: Requirements, endpoint: Endpoint, bucket: str) -> list[str]:
    return [
        action
        for action, resource in policies.bucket_actions(
            bucket, write=bucket in requirements.written
        )
        if policies.decide([endpoint.policy], action, resource) in {"denied", "absent"}
    ]


def _policy_finding(
    requirements: Requirements, endpoint: Endpoint, refused: Mapping[str, list[str]]
) -> Finding:
    statements = list(policies.statements(endpoint.policy))
    denying = [
        one
        for one in statements
        if any(policies.denies(one, a, r) for b in refused for a, r in policies.bucket_actions(b))
    ]
    kept = [one for one in statements if one not in denying]
    kept += [policies.allow_bucket(bucket) | {"Principal": "*"} for bucket in refused]
    policy = {"Version": "2012-10-17", "Statement": kept}
    shown = denying or statements
    summary = "allow the job's buckets" + (", and remove the Deny" if denying else "")
    return Finding(
        "endpoint_policy",
        "error",
        f"the policy of {endpoint.id} (S3) does not allow "
        + "; ".join(f"{', '.join(actions)} on {bucket}" for bucket, actions in refused.items()),
        tuple(f"{endpoint.id}: {policies.shown(one)}" for one in shown),
        _policy_fix(requirements, endpoint, policy, summary),
    )


def _policy_fix(
    requirements: Requirements, endpoint: Endpoint, policy: Mapping[str, Any], summary: str
) -> Fix:
    return fixes.make(
        "endpoint-policy",
        summary,
        region=requirements.region,
        endpoint=endpoint.id,
        policy=policy,
    )
