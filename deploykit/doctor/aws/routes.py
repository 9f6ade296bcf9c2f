"""Checks of a job's subnets, and of their routes to S3 and to the internet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv4Network

from deploykit.doctor import fixes
from deploykit.doctor.aws.network import ANYWHERE, Network, Route, RouteTable, Subnet
from deploykit.lib.finding import Finding, Fix

_ADDRESSES, _ADDRESSES_EFA = 2, 5
"""Private addresses that SageMaker uses for one instance:
https://docs.aws.amazon.com/sagemaker/latest/dg/train-vpc.html."""
_SMALLEST = 28
"""Prefix length of the smallest subnet that EC2 allows."""
_RESERVED = 5
"""Addresses of each subnet that EC2 reserves."""


def subnet_findings(network: Network) -> Iterator[Finding]:
    """Missing subnets, several VPCs or zones, too few addresses, dedicated tenancy."""
    if not network.answered("describe-subnets"):
        return
    existing = network.existing_subnets
    if len(existing) < len(network.job.subnets):
        yield _missing(network)
    if len({subnet.vpc for subnet in existing}) > 1:
        yield Finding(
            "subnet_vpcs",
            "error",
            "the subnets are in different VPCs, but a job runs in one",
            tuple(f"{subnet.id}: {subnet.vpc}" for subnet in existing),
            _use(f"keep those of {network.vpc}", network.job_subnets),
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
    summary = "use subnets that exist; `aws ec2 describe-subnets` lists those of a region"
    return Finding(
        "subnet_not_found",
        "error",
        f"subnet not found in {job.region} of this account: {', '.join(missing)}",
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
        yield Finding("subnet_zones", "error", message, evidence, _use("keep one", [best]))
        return
    message = (
        "the subnets are in different zones: traffic across zones is slower, and each byte is "
        "billed"
    )
    kept = [subnet for subnet in subnets if subnet.zone == best.zone]
    fix = _use(f"keep those of {best.zone}", kept)
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
            summary = f"{subnet.id} in the same zone has {subnet.free} free addresses"
            return _use(summary, [subnet])
    block, table = _free_block(network, like.vpc, wanted), network.table_of(like.id)
    if block is None or table is None:
        return Fix("free addresses, or add a block to the VPC and a subnet in it")
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
        summary = "set its tenancy to default; running instances are not changed"
        yield Finding(
            "vpc_tenancy",
            "error",
            f"{vpc} has dedicated tenancy, which SageMaker does not support",
            (f"{vpc}: InstanceTenancy {known.tenancy}",),
            network.fix("tenancy", summary, vpc=vpc, block=str(known.blocks[0])),
        )


def route_findings(network: Network) -> Iterator[Finding]:
    """Broken NAT routes, and subnets that cannot reach S3."""
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
            summary = f"route to {nat.id}, which works"
            return network.fix("nat-route", summary, table=table.id, nat=nat.id)
    for subnet in network.subnets.values():
        if subnet.vpc == table.vpc and network.is_public(subnet.id):
            summary = f"create a NAT gateway in {subnet.id} (billed by the hour) and route to it"
            return network.fix("nat", summary, table=table.id, subnet=subnet.id)
    way_out = "create a public subnet with an internet gateway, and a NAT gateway in it"
    if network.s3_gateway(table) is not None:
        return Fix(way_out)
    s3 = _s3_fix(network, table)
    return replace(s3, summary=f"{s3.summary}; for the internet as well: {way_out}")


def _no_s3(network: Network, table: RouteTable) -> Finding:
    route = table.default
    why = "no gateway endpoint, and no NAT gateway"
    if route is not None and route.to_internet_gateway:
        why = f"{route.target} serves only public IPs, and instances of the job have none"
    users = [s.id for s in network.job_subnets if network.table_of(s.id) == table]
    routes = ", ".join(f"{route.destination} -> {route.target}" for route in table.routes)
    others = (
        f"{gateway.id} (S3) serves only {', '.join(gateway.tables) or 'no route table'}"
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
        return network.fix("s3-endpoint-table", summary, endpoint=gateway.id, table=table.id)
    summary = "create a gateway endpoint for S3 (free of charge)"
    return network.fix("s3-endpoint", summary, vpc=table.vpc, table=table.id)
