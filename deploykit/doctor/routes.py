"""Checks of a job's subnets, of their routes to S3 and to the internet, and of VPC endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from ipaddress import IPv4Network

from deploykit.doctor import account, firewall, fixes
from deploykit.doctor.network import (
    ANYWHERE,
    Endpoint,
    Network,
    Route,
    RouteTable,
    SecurityGroup,
    Subnet,
    Vpc,
)
from deploykit.doctor.requirements import HTTPS, Flow
from deploykit.lib.finding import Finding, Fix, Severity

_ADDRESSES, _ADDRESSES_EFA = 2, 5
"""Private addresses that SageMaker uses for one instance:
https://docs.aws.amazon.com/sagemaker/latest/dg/train-vpc.html."""
_SMALLEST = 28
"""Prefix length of the smallest subnet that EC2 allows."""
_RESERVED = 5
"""Addresses of each subnet that EC2 reserves."""
_COMMON_SERVICES = ("ecr.api", "ecr.dkr", "logs", "sagemaker.api", "sts")
"""Services that a training script may call. SageMaker itself pulls the image and writes the logs
outside the VPC: https://docs.aws.amazon.com/sagemaker/latest/dg/train-vpc.html."""


def subnet_findings(network: Network) -> Iterator[Finding]:
    if not network.answered("describe-subnets"):
        return
    existing = network.existing_subnets
    if len(existing) < len(network.job.subnets):
        yield _missing(network)
    if len({subnet.vpc for subnet in existing}) > 1:
        yield Finding(
            "subnet_vpcs",
            "error",
            "the subnets are in different VPCs, but a job can use only one VPC",
            tuple(f"{subnet.id}: {subnet.vpc}" for subnet in existing),
            _use(f"keep the subnets in {network.vpc}", network.job_subnets),
        )
    elif existing:
        yield from _zones(network)
        yield from _addresses(network)
    for vpc in sorted({subnet.vpc for subnet in existing}):
        yield from _tenancy(network, vpc)


def _use(summary: str, subnets: list[Subnet]) -> Fix:
    return fixes.job_file(summary, subnets=[subnet.id for subnet in subnets])


def _missing(network: Network) -> Finding:
    job = network.job
    missing = [name for name in job.subnets if name not in network.subnets]
    candidates = network.existing_subnets or _subnets_of_groups(network)
    summary = "use existing subnets; `aws ec2 describe-subnets` lists them"
    return Finding(
        "subnet_not_found",
        "error",
        f"subnet not found in this account in {job.region}: {', '.join(missing)}",
        (f"sagemaker.subnets: {', '.join(job.subnets)}", *map(_free, candidates)),
        _use(summary, candidates[:1]) if candidates else Fix(summary),
    )


def _free(subnet: Subnet) -> str:
    return f"{subnet.id}: {subnet.zone}, {subnet.free} free addresses"


def _subnets_of_groups(network: Network) -> list[Subnet]:
    """Subnets in the VPCs of the job's security groups, private ones with most addresses first."""
    vpcs = {group.vpc for group in network.existing_groups}
    candidates = [subnet for subnet in network.subnets.values() if subnet.vpc in vpcs]
    return sorted(candidates, key=lambda subnet: (network.is_public(subnet.id), -subnet.free))


def _zones(network: Network) -> Iterator[Finding]:
    """Traffic between zones is slow and billed; EFA traffic cannot leave its subnet at all."""
    job, subnets = network.job, network.existing_subnets
    apart = len(subnets if job.efa else {subnet.zone for subnet in subnets}) > 1
    if job.nodes == 1 or not apart:
        return
    best = max(subnets, key=lambda subnet: subnet.free)
    evidence = tuple(map(_free, subnets))
    if job.efa:
        message = (
            f"EFA traffic of {job.instance_type} cannot leave its subnet, but the job uses "
            f"{len(subnets)} subnets"
        )
        yield Finding("subnet_zones", "error", message, evidence, _use("keep one subnet", [best]))
        return
    message = "the subnets are in different zones; traffic between zones is slower and billed"
    kept = [subnet for subnet in subnets if subnet.zone == best.zone]
    fix = _use(f"keep the subnets in {best.zone}", kept)
    yield Finding("subnet_zones", "warning", message, evidence, fix)


def _addresses(network: Network) -> Iterator[Finding]:
    job, subnets = network.job, network.existing_subnets
    per_node = _ADDRESSES_EFA if job.efa else _ADDRESSES
    wanted, free = per_node * job.nodes, sum(subnet.free for subnet in subnets)
    if free < wanted:
        yield Finding(
            "subnet_full",
            "error",
            f"the job requires {wanted} free addresses ({per_node} for each of {job.nodes} "
            f"nodes), but its subnets have {free}",
            tuple(f"{subnet.id}: {subnet.free} free of {subnet.block}" for subnet in subnets),
            _larger_subnet(network, subnets[0], wanted),
        )


def _larger_subnet(network: Network, like: Subnet, wanted: int) -> Fix:
    """Another subnet of the same zone with enough addresses, else a new one in the VPC."""
    for subnet in network.subnets.values():
        same_place = (subnet.vpc, subnet.zone) == (like.vpc, like.zone)
        if same_place and subnet.free >= wanted and not network.is_public(subnet.id):
            summary = f"use {subnet.id} in the same zone, with {subnet.free} free addresses"
            return _use(summary, [subnet])
    block, table = _free_block(network, like.vpc, wanted), network.table_of(like.id)
    if block is None or table is None:
        return Fix(
            "release unused addresses, or add a CIDR block to the VPC and a subnet in that block"
        )
    return network.fix(
        "subnet",
        f"create a larger subnet in {like.zone} with the same routes",
        vpc=like.vpc,
        zone=like.zone,
        block=str(block),
        table=table.id,
    )


def _free_block(network: Network, vpc: str, wanted: int) -> IPv4Network | None:
    """The first block of the VPC that holds `wanted` addresses and overlaps no subnet."""
    taken = [subnet.block for subnet in network.subnets.values() if subnet.vpc == vpc]
    length = min(_SMALLEST, 32 - (wanted + _RESERVED - 1).bit_length())
    for whole in network.vpcs[vpc].blocks if vpc in network.vpcs else ():
        for block in whole.subnets(new_prefix=length) if whole.prefixlen <= length else ():
            if not any(block.overlaps(other) for other in taken):
                return block
    return None


def _tenancy(network: Network, vpc: str) -> Iterator[Finding]:
    known = network.vpcs.get(vpc)
    if known is not None and known.tenancy != "default":
        summary = "set its tenancy to default; running instances are not affected"
        yield Finding(
            "vpc_tenancy",
            "error",
            f"{vpc} has dedicated tenancy, which SageMaker does not support",
            (f"{vpc}: InstanceTenancy {known.tenancy}",),
            network.fix("tenancy", summary, vpc=vpc, block=str(known.blocks[0])),
        )


def route_findings(network: Network) -> Iterator[Finding]:
    for table in network.job_tables if network.knows_routes else ():
        route = table.default
        if route is not None and (why := network.why_broken(route)) is not None:
            yield _broken_nat(network, table, route, why)
        elif not network.reaches_s3(table):
            yield _no_s3(network, table)


def _broken_nat(network: Network, table: RouteTable, route: Route, why: str) -> Finding:
    gateway = network.s3_gateway(table)
    state = "active" if route.works else "blackhole"
    return Finding(
        "nat_broken",
        "warning" if gateway else "error",
        f"the route to {'the internet' if gateway else 'S3 and the internet'} is broken: {why}",
        (f"{table.id}: {ANYWHERE} -> {route.target or 'nothing'}, {state}",),
        _nat_fix(network, table),
    )


def _nat_fix(network: Network, table: RouteTable) -> Fix:
    for nat in network.nats.values():
        if nat.vpc == table.vpc and nat.state == "available" and network.is_public(nat.subnet):
            summary = f"route to the working NAT gateway {nat.id}"
            return network.fix("nat_route", summary, table=table.id, nat=nat.id)
    for subnet in network.subnets.values():
        if subnet.vpc == table.vpc and network.is_public(subnet.id):
            summary = f"create a NAT gateway in {subnet.id} (billed by the hour) and route to it"
            return network.fix("nat", summary, table=table.id, subnet=subnet.id)
    way_out = "create a public subnet with an internet gateway, and a NAT gateway in it"
    if network.s3_gateway(table) is not None:
        return Fix(way_out)
    s3 = _s3_fix(network, table)
    return replace(s3, summary=f"{s3.summary}; for internet access as well, {way_out}")


def _no_s3(network: Network, table: RouteTable) -> Finding:
    route = table.default
    why = "there is no gateway endpoint or NAT gateway"
    if route is not None and route.to_internet_gateway:
        why = f"{route.target} serves only public IPs, which the job's instances do not have"
    users = [s.id for s in network.job_subnets if network.table_of(s.id) == table]
    routes = ", ".join(f"{route.destination} -> {route.target}" for route in table.routes)
    others = (
        f"{gateway.id} (S3) serves the route tables: {', '.join(gateway.tables) or 'none'}"
        for gateway in network.s3_gateways(table.vpc)
    )
    return Finding(
        "s3_route",
        "error",
        f"no route to S3 from {', '.join(users)}: {why}. The job fails with `Data download failed`",
        (f"{table.id}: {routes or 'no routes'}", *others),
        _s3_fix(network, table),
    )


def _s3_fix(network: Network, table: RouteTable) -> Fix:
    for gateway in network.s3_gateways(table.vpc):
        summary = f"associate {gateway.id} with {table.id}"
        return network.fix("s3_endpoint_table", summary, endpoint=gateway.id, table=table.id)
    summary = "create a gateway endpoint for S3 (free of charge)"
    return network.fix("s3_endpoint", summary, vpc=table.vpc, table=table.id)


def endpoint_findings(network: Network) -> Iterator[Finding]:
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
        message = "DNS is off in the VPC, so no host name resolves, not even S3's"
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
    fix = network.fix("vpc_dns", f"turn on {attribute}", vpc=vpc.id, block=block, option=option)
    return Finding("vpc_dns", "error", message, (f"{vpc.id}: {attribute} is false",), fix)


def _interface_endpoints(network: Network) -> Iterator[Finding]:
    services = [*_COMMON_SERVICES, *network.job.secrets]
    endpoints = network.working_endpoints(str(network.vpc), *services)
    existing = {endpoint.service: endpoint for endpoint in endpoints if not endpoint.gateway}
    missing = [name for name in services if name not in existing]
    if missing:
        yield _missing_endpoints(network, missing)
    for name in services:
        if name in existing:
            yield from _interface_endpoint(network, existing[name])


def _severity(network: Network, services: list[str]) -> Severity:
    return "error" if set(network.job.secrets).intersection(services) else "warning"


def _missing_endpoints(network: Network, missing: list[str]) -> Finding:
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
                "endpoint_dns",
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
            f"{group.id} inbound: {'; '.join(map(str, group.rules[False])) or 'no rules'}"
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
        for action, resource in account.bucket_actions(bucket, write=write)
        if account.decide([endpoint.policy], action, resource) in {"denied", "absent"}
    ]


def _refusing_policy(
    network: Network, endpoint: Endpoint, refused: Mapping[str, list[str]]
) -> Finding:
    statements = list(account.statements(endpoint.policy))
    wanted = [pair for bucket in refused for pair in account.bucket_actions(bucket)]
    denying = [s for s in statements if any(account.denies(s, *pair) for pair in wanted)]
    allowing = [account.allow_bucket(bucket) | {"Principal": "*"} for bucket in refused]
    kept = [statement for statement in statements if statement not in denying]
    return Finding(
        "endpoint_policy",
        "error",
        f"the policy of {endpoint.id} (S3) does not allow "
        + "; ".join(f"{', '.join(actions)} on {bucket}" for bucket, actions in refused.items()),
        tuple(f"{endpoint.id}: {json.dumps(statement)}" for statement in denying or statements),
        network.fix(
            "endpoint_policy",
            "allow access to the job's buckets"
            + (", and remove the Deny statement" if denying else ""),
            endpoint=endpoint.id,
            policy=account.policy_document([*kept, *allowing]),
        ),
    )
