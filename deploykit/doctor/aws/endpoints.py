"""Checks of VPC endpoints, which replace internet access: existence, DNS, groups, policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deploykit.doctor.aws import firewall, policies
from deploykit.doctor.aws.network import Endpoint, Network, SecurityGroup, Subnet, Vpc
from deploykit.doctor.aws.requirements import HTTPS, Flow
from deploykit.lib.finding import Finding, Severity

_COMMON_SERVICES = ("ecr.api", "ecr.dkr", "logs", "sagemaker.api", "sts")
"""Services that a training script may call. SageMaker itself pulls the image and writes the logs
outside the VPC: https://docs.aws.amazon.com/sagemaker/latest/dg/train-vpc.html."""


def findings(network: Network) -> Iterator[Finding]:
    """Problems with the endpoints and the DNS attributes of the job's VPC."""
    if not network.knows_routes or not network.job_subnets:
        return
    yield from _dns(network)
    yield from _policies(network)
    routes = [table.default for table in network.job_tables]
    if all(route is None or route.to_internet_gateway for route in routes):
        yield from _interface_endpoints(network)


def _dns(network: Network) -> Iterator[Finding]:
    vpc = network.vpcs.get(network.vpc or "")
    if vpc is None:
        return
    if vpc.dns_support is False:
        message = "DNS is off in the VPC: no host name resolves, not even S3's"
        yield _attribute(network, vpc, "enableDnsSupport", "--enable-dns-support", message)
    private_names = [
        endpoint
        for endpoint in network.endpoints
        if endpoint.vpc == vpc.id and not endpoint.gateway and endpoint.private_dns
    ]
    if vpc.dns_hostnames is False and private_names:
        message = "the names of AWS services do not resolve to the VPC's endpoints"
        yield _attribute(network, vpc, "enableDnsHostnames", "--enable-dns-hostnames", message)


def _attribute(network: Network, vpc: Vpc, attribute: str, option: str, message: str) -> Finding:
    block = str(vpc.blocks[0])
    fix = network.fix("vpc-dns", f"turn on {attribute}", vpc=vpc.id, block=block, option=option)
    return Finding("vpc_dns", "error", message, (f"{vpc.id}: {attribute} is false",), fix)


def _interface_endpoints(network: Network) -> Iterator[Finding]:
    services = [*_COMMON_SERVICES, *network.job.secrets]
    endpoints = network.working_endpoints(str(network.vpc), *services)
    existing = {endpoint.service: endpoint for endpoint in endpoints if not endpoint.gateway}
    missing = [name for name in services if name not in existing]
    if missing:
        yield _missing(network, missing)
    for name in services:
        if name in existing:
            yield from _interface_endpoint(network, existing[name])


def _severity(network: Network, services: list[str]) -> Severity:
    return "error" if set(network.job.secrets).intersection(services) else "warning"


def _missing(network: Network, missing: list[str]) -> Finding:
    for_secrets = ", ".join(name for name in missing if name in network.job.secrets)
    impact = (
        "Connections that the script opens (pip, downloads, trackers, these services) hang "
        "until they time out; training itself needs only S3."
    )
    if for_secrets:
        impact = f"The job's secrets cannot be read without {for_secrets}."
    subnets = network.job_subnets
    groups = _groups_for_endpoints(network)
    # groups of the job that the endpoints would have, and that do not admit their own members yet
    inside = [
        group.id
        for group in network.job_groups
        if group.id in groups and not _admits(network, [group], {group.id})
    ]
    return Finding(
        "no_endpoint",
        _severity(network, missing),
        f"the subnets have no internet access, and the VPC has no endpoint for "
        f"{', '.join(missing)}. {impact}",
        tuple(_default_route(network, subnet) for subnet in subnets),
        network.fix(
            "endpoints",
            "create the endpoints (billed by the hour), or route 0.0.0.0/0 to a NAT gateway",
            vpc=network.vpc,
            services=missing,
            # an endpoint accepts one subnet of each zone
            subnets=list({subnet.zone: subnet.id for subnet in reversed(subnets)}.values()),
            groups=groups,
            inside=inside,
        ),
    )


def _default_route(network: Network, subnet: Subnet) -> str:
    table, route = network.table_of(subnet.id), network.default_route(subnet.id)
    name = table.id if table else "no route table"
    if route is None:
        return f"{subnet.id}, {name}: no route to 0.0.0.0/0"
    return f"{subnet.id}, {name}: 0.0.0.0/0 -> {route.target}, for public addresses only"


def _groups_for_endpoints(network: Network) -> list[str]:
    """The groups of an existing endpoint that admits the job, else the job's own groups."""
    members = {group.id for group in network.job_groups}
    for endpoint in network.endpoints:
        groups = _groups(network, endpoint)
        if endpoint.vpc == network.vpc and groups and _admits(network, groups, members):
            return [group.id for group in groups]
    return sorted(members)


def _groups(network: Network, endpoint: Endpoint) -> list[SecurityGroup]:
    return [network.groups[name] for name in endpoint.groups if name in network.groups]


def _admits(network: Network, groups: list[SecurityGroup], members: set[str]) -> bool:
    subnets = network.job_subnets
    return all(firewall.admits_https(groups, members, subnet.block) for subnet in subnets)


def _interface_endpoint(network: Network, endpoint: Endpoint) -> Iterator[Finding]:
    members = {group.id for group in network.job_groups}
    groups = _groups(network, endpoint)
    if not endpoint.private_dns:
        yield Finding(
            "endpoint_dns",
            _severity(network, [endpoint.service]),
            f"private DNS is off: the name of {endpoint.service} does not resolve to its endpoint",
            (f"{endpoint.id}: PrivateDnsEnabled is false",),
            network.fix(
                "endpoint-dns",
                "turn on private DNS",
                vpc=endpoint.vpc,
                endpoint=endpoint.id,
                service=endpoint.service,
                subnets=list(endpoint.subnets),
                groups=list(endpoint.groups),
            ),
        )
    if members and not _admits(network, groups, members):
        member = min(members)
        rules = (
            f"{group.id} inbound: {'; '.join(map(str, group.inbound)) or 'no rules'}"
            for group in groups
        )
        yield Finding(
            "endpoint_blocked",
            _severity(network, [endpoint.service]),
            f"the endpoint for {endpoint.service} does not allow tcp 443 from the job",
            (f"{endpoint.id}: {', '.join(endpoint.groups)}", *rules),
            firewall.rule_fix(
                network,
                endpoint.groups[0] if endpoint.groups else member,
                f"allow tcp 443 from {member}",
                [(Flow("tcp", (HTTPS,)), member)],
                outbound=False,
            ),
        )


def _policies(network: Network) -> Iterator[Finding]:
    """Actions on the job's buckets that the policy of the S3 gateway endpoint does not allow."""
    gateways = (network.s3_gateway(table) for table in network.job_tables)
    by_id = {gateway.id: gateway for gateway in gateways if gateway is not None}
    for endpoint in by_id.values():
        refused = {bucket: _refused(network, endpoint, bucket) for bucket in network.job.buckets}
        refused = {bucket: actions for bucket, actions in refused.items() if actions}
        if refused:
            yield _refusing_policy(network, endpoint, refused)


def _refused(network: Network, endpoint: Endpoint, bucket: str) -> list[str]:
    write = bucket in network.job.written
    return [
        action
        for action, resource in policies.bucket_actions(bucket, write=write)
        if policies.decide([endpoint.policy], action, resource) in {"denied", "absent"}
    ]


def _refusing_policy(
    network: Network, endpoint: Endpoint, refused: Mapping[str, list[str]]
) -> Finding:
    statements = list(policies.statements(endpoint.policy))
    wanted = [pair for bucket in refused for pair in policies.bucket_actions(bucket)]
    denying = [s for s in statements if any(policies.denies(s, *pair) for pair in wanted)]
    allowing = [policies.allow_bucket(bucket) | {"Principal": "*"} for bucket in refused]
    kept = [statement for statement in statements if statement not in denying]
    return Finding(
        "endpoint_policy",
        "error",
        f"the policy of {endpoint.id} (S3) does not allow "
        + "; ".join(f"{', '.join(actions)} on {bucket}" for bucket, actions in refused.items()),
        tuple(f"{endpoint.id}: {policies.shown(statement)}" for statement in denying or statements),
        network.fix(
            "endpoint-policy",
            "allow the job's buckets" + (", and remove the Deny" if denying else ""),
            endpoint=endpoint.id,
            policy=policies.document([*kept, *allowing]),
        ),
    )
