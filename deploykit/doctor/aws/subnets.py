"""Checks of a job's subnets: they exist in one VPC and zone, and have free addresses."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from deploykit.doctor import fixes
from deploykit.doctor.aws import routes
from deploykit.doctor.aws.inventory import Inventory, Network, Subnet
from deploykit.doctor.aws.requirements import Requirements
from deploykit.lib.finding import Finding, Fix

_ADDRESSES, _ADDRESSES_EFA = 2, 5
"""Private addresses that SageMaker uses for one instance:
https://docs.aws.amazon.com/sagemaker/latest/dg/train-vpc.html."""
_SMALLEST = 28
"""Prefix length of the smallest subnet that EC2 allows."""
_RESERVED = 5
"""Addresses of each subnet that EC2 reserves."""


def findings(requirements: Requirements, inventory: Inventory) -> Iterator[Finding]:
    """Missing subnets, several VPCs or zones, too few addresses, dedicated tenancy."""
    if inventory.subnets is None:
        return
    missing = [name for name in requirements.subnets if name not in inventory.subnets]
    existing = [
        inventory.subnets[name] for name in requirements.subnets if name in inventory.subnets
    ]
    if missing:
        yield _missing(requirements, inventory, missing, existing)
    if len({subnet.vpc for subnet in existing}) > 1:
        yield _several_vpcs(requirements, inventory, existing)
    elif existing:
        yield from _zones(requirements, existing)
        yield from _addresses(requirements, inventory, existing)
    yield from _tenancy(requirements, inventory, existing)


def _missing(
    requirements: Requirements, inventory: Inventory, missing: list[str], existing: list[Subnet]
) -> Finding:
    candidates = existing or _of_groups(requirements, inventory)
    evidence = [
        f"{subnet.id}: {subnet.zone}, {subnet.free} free addresses" for subnet in candidates
    ]
    summary = "use subnets that exist; `aws ec2 describe-subnets` lists those of a region"
    fix = (
        fixes.job_file(summary, subnets=[subnet.id for subnet in candidates[:1]])
        if candidates
        else Fix(summary)
    )
    return Finding(
        "subnet_not_found",
        "error",
        f"subnet not found in {requirements.region} of this account: {', '.join(missing)}",
        (f"sagemaker.subnets: {', '.join(requirements.subnets)}", *evidence),
        fix,
    )


def _of_groups(requirements: Requirements, inventory: Inventory) -> list[Subnet]:
    """Subnets in the VPCs of the job's security groups, private ones with most addresses first."""
    groups = inventory.groups or {}
    vpcs = {groups[name].vpc for name in requirements.groups if name in groups}
    candidates = [subnet for subnet in (inventory.subnets or {}).values() if subnet.vpc in vpcs]
    return sorted(
        candidates, key=lambda subnet: (routes.is_public(inventory, subnet.id), -subnet.free)
    )


def _several_vpcs(
    requirements: Requirements, inventory: Inventory, existing: list[Subnet]
) -> Finding:
    chosen = routes.vpc_of_job(requirements, inventory)
    kept = [subnet.id for subnet in existing if subnet.vpc == chosen]
    return Finding(
        "subnet_vpcs",
        "error",
        "the subnets are in different VPCs, but a job runs in one",
        tuple(f"{subnet.id}: {subnet.vpc}" for subnet in existing),
        fixes.job_file(f"keep those of {chosen}", subnets=kept),
    )


def _zones(requirements: Requirements, existing: list[Subnet]) -> Iterator[Finding]:
    """Traffic between zones is slow and billed; EFA traffic cannot leave its subnet at all."""
    apart = len(existing) > 1 if requirements.efa else len({subnet.zone for subnet in existing}) > 1
    if requirements.nodes == 1 or not apart:
        return
    best = max(existing, key=lambda subnet: subnet.free)
    kept = (
        [best] if requirements.efa else [subnet for subnet in existing if subnet.zone == best.zone]
    )
    yield Finding(
        "subnet_zones",
        "error" if requirements.efa else "warning",
        f"EFA traffic of {requirements.instance_type} cannot leave its subnet, but the job uses "
        f"{len(existing)} subnets"
        if requirements.efa
        else "the subnets are in different zones: traffic across zones is slower, and each byte is "
        "billed",
        tuple(f"{subnet.id}: {subnet.zone}, {subnet.free} free addresses" for subnet in existing),
        fixes.job_file(
            f"keep {'one' if requirements.efa else f'those of {best.zone}'}",
            subnets=[subnet.id for subnet in kept],
        ),
    )


def _addresses(
    requirements: Requirements, inventory: Inventory, existing: list[Subnet]
) -> Iterator[Finding]:
    per_node = _ADDRESSES_EFA if requirements.efa else _ADDRESSES
    wanted = per_node * requirements.nodes
    if sum(subnet.free for subnet in existing) >= wanted:
        return
    yield Finding(
        "subnet_full",
        "error",
        f"the job requires {wanted} free addresses ({per_node} for each of {requirements.nodes} "
        f"nodes), but its subnets have {sum(subnet.free for subnet in existing)}",
        tuple(f"{subnet.id}: {subnet.free} free of {subnet.block}" for subnet in existing),
        _larger_subnet(requirements, inventory, existing[0], wanted),
    )


def _larger_subnet(
    requirements: Requirements, inventory: Inventory, like: Subnet, wanted: int
) -> Fix:
    """Another subnet of the same zone with enough addresses, else a new one in the VPC."""
    candidates = [
        subnet
        for subnet in (inventory.subnets or {}).values()
        if (subnet.vpc, subnet.zone) == (like.vpc, like.zone)
        and subnet.free >= wanted
        and not routes.is_public(inventory, subnet.id)
    ]
    if candidates:
        return fixes.job_file(
            f"{candidates[0].id} in the same zone has {candidates[0].free} free addresses",
            subnets=[candidates[0].id],
        )
    block = _free_block(inventory, like.vpc, wanted)
    table = routes.table_of(inventory, like.id)
    if block is None or table is None:
        return Fix("free addresses, or add a block to the VPC and a subnet in it")
    return fixes.make(
        "subnet",
        f"create a larger subnet in {like.zone} with the same routes",
        region=requirements.region,
        vpc=like.vpc,
        zone=like.zone,
        block=str(block),
        table=table.id,
    )


def _free_block(inventory: Inventory, vpc: str, wanted: int) -> Network | None:
    """The first block of the VPC that holds `wanted` addresses and overlaps no subnet."""
    taken = [subnet.block for subnet in (inventory.subnets or {}).values() if subnet.vpc == vpc]
    length = min(_SMALLEST, 32 - (wanted + _RESERVED - 1).bit_length())
    found_vpc = (inventory.vpcs or {}).get(vpc)
    for whole in found_vpc.blocks if found_vpc else ():
        if whole.prefixlen > length:
            continue
        for block in whole.subnets(new_prefix=length):
            if not any(block.overlaps(other) for other in taken):
                return ipaddress.IPv4Network(block)
    return None


def _tenancy(
    requirements: Requirements, inventory: Inventory, existing: list[Subnet]
) -> Iterator[Finding]:
    for vpc in sorted({subnet.vpc for subnet in existing}):
        found_vpc = (inventory.vpcs or {}).get(vpc)
        if found_vpc is not None and found_vpc.tenancy != "default":
            yield Finding(
                "vpc_tenancy",
                "error",
                f"{vpc} has dedicated tenancy, which SageMaker does not support",
                (f"{vpc}: InstanceTenancy {found_vpc.tenancy}",),
                fixes.make(
                    "tenancy",
                    "set its tenancy to default; running instances are not changed",
                    region=requirements.region,
                    vpc=vpc,
                    block=str(found_vpc.blocks[0]),
                ),
            )
