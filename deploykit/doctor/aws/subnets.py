"""The subnets of a job: they exist, in one VPC and zone, and have addresses left."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from deploykit.doctor import fixes
from deploykit.doctor.aws import routes
from deploykit.doctor.aws.facts import Facts, Network, Subnet
from deploykit.doctor.aws.needs import Needs
from deploykit.doctor.finding import Finding, Fix

_ADDRESSES, _ADDRESSES_EFA = 2, 5
"""Private addresses that SageMaker needs for one machine:
https://docs.aws.amazon.com/sagemaker/latest/dg/train-vpc.html."""
_SMALLEST = 28
"""Length of the prefix of the smallest subnet that EC2 makes."""
_RESERVED = 5
"""Addresses of each subnet that EC2 keeps for itself."""


def check(needs: Needs, facts: Facts) -> Iterator[Finding]:
    if facts.subnets is None:
        return
    absent = [name for name in needs.subnets if name not in facts.subnets]
    ours = [facts.subnets[name] for name in needs.subnets if name in facts.subnets]
    if absent:
        yield _absent(needs, facts, absent, ours)
    if len({subnet.vpc for subnet in ours}) > 1:
        yield _several_vpcs(needs, facts, ours)
    elif ours:
        yield from _zones(needs, facts, ours)
        yield from _addresses(needs, facts, ours)
    yield from _tenancy(needs, facts, ours)


def _absent(needs: Needs, facts: Facts, absent: list[str], ours: list[Subnet]) -> Finding:
    names = ", ".join(absent)
    left = ours or _of_groups(needs, facts)
    evidence = [f"{subnet.id}: {subnet.zone}, {subnet.free} free addresses" for subnet in left]
    say = "name subnets that exist; `aws ec2 describe-subnets` lists them, region by region"
    fix = fixes.job_file(say, subnets=[subnet.id for subnet in left[:1]]) if left else Fix(say)
    return Finding(
        "subnet_absent",
        "error",
        f"{names} {'does' if len(absent) == 1 else 'do'} not exist in {needs.region}, "
        "or not in this account",
        (f"sagemaker.subnets: {', '.join(needs.subnets)}", *evidence),
        fix,
    )


def _of_groups(needs: Needs, facts: Facts) -> list[Subnet]:
    """Subnets in the VPC of the job's security groups, those without a public route first."""
    groups = facts.groups or {}
    vpcs = {groups[name].vpc for name in needs.groups if name in groups}
    near = [subnet for subnet in (facts.subnets or {}).values() if subnet.vpc in vpcs]
    return sorted(near, key=lambda subnet: (routes.is_public(facts, subnet.id), -subnet.free))


def _several_vpcs(needs: Needs, facts: Facts, ours: list[Subnet]) -> Finding:
    chosen = routes.home(needs, facts)
    kept = [subnet.id for subnet in ours if subnet.vpc == chosen]
    return Finding(
        "subnet_vpcs",
        "error",
        "the subnets lie in different VPCs, and a job runs in one",
        tuple(f"{subnet.id}: {subnet.vpc}" for subnet in ours),
        fixes.job_file(f"keep those of {chosen}", subnets=kept),
    )


def _zones(needs: Needs, facts: Facts, ours: list[Subnet]) -> Iterator[Finding]:
    """Traffic between zones is slow and billed; EFA cannot leave its subnet at all."""
    apart = len(ours) > 1 if facts.efa else len({subnet.zone for subnet in ours}) > 1
    if needs.nodes == 1 or not apart:
        return
    best = max(ours, key=lambda subnet: subnet.free)
    kept = [best] if facts.efa else [subnet for subnet in ours if subnet.zone == best.zone]
    yield Finding(
        "subnet_zones",
        "error" if facts.efa else "warning",
        f"EFA traffic of {needs.instance_type} cannot leave its subnet, and the job names "
        f"{len(ours)}"
        if facts.efa
        else "the subnets lie in different zones: machines that talk across zones are slower, "
        "and each byte is billed",
        tuple(f"{subnet.id}: {subnet.zone}, {subnet.free} free addresses" for subnet in ours),
        fixes.job_file(
            f"keep {'one' if facts.efa else f'those of {best.zone}'}",
            subnets=[subnet.id for subnet in kept],
        ),
    )


def _addresses(needs: Needs, facts: Facts, ours: list[Subnet]) -> Iterator[Finding]:
    each = _ADDRESSES_EFA if facts.efa else _ADDRESSES
    wanted = each * needs.nodes
    if sum(subnet.free for subnet in ours) >= wanted:
        return
    yield Finding(
        "subnet_full",
        "error",
        f"the job needs {wanted} free addresses ({each} for each of {needs.nodes} machines), "
        f"and its subnets have {sum(subnet.free for subnet in ours)}",
        tuple(f"{subnet.id}: {subnet.free} free of {subnet.block}" for subnet in ours),
        _roomier(needs, facts, ours[0], wanted),
    )


def _roomier(needs: Needs, facts: Facts, like: Subnet, wanted: int) -> Fix:
    """Another subnet of the same zone with room, else a new one in what is left of the VPC."""
    near = [
        subnet
        for subnet in (facts.subnets or {}).values()
        if (subnet.vpc, subnet.zone) == (like.vpc, like.zone)
        and subnet.free >= wanted
        and not routes.is_public(facts, subnet.id)
    ]
    if near:
        return fixes.job_file(
            f"{near[0].id} in the same zone has {near[0].free} free", subnets=[near[0].id]
        )
    block = _free_block(facts, like.vpc, wanted)
    table = routes.table_of(facts, like.id)
    if block is None or table is None:
        return Fix("free addresses, or add a block to the VPC and a subnet in it")
    return fixes.make(
        "subnet",
        f"make a larger subnet in {like.zone} with the same routes",
        region=needs.region,
        vpc=like.vpc,
        zone=like.zone,
        block=str(block),
        table=table.id,
    )


def _free_block(facts: Facts, vpc: str, wanted: int) -> Network | None:
    """The first block of the VPC that holds `wanted` addresses and overlaps no subnet."""
    taken = [subnet.block for subnet in (facts.subnets or {}).values() if subnet.vpc == vpc]
    length = min(_SMALLEST, 32 - (wanted + _RESERVED - 1).bit_length())
    home = (facts.vpcs or {}).get(vpc)
    for whole in home.blocks if home else ():
        if whole.prefixlen > length:
            continue
        for block in whole.subnets(new_prefix=length):
            if not any(block.overlaps(other) for other in taken):
                return ipaddress.IPv4Network(block)
    return None


def _tenancy(needs: Needs, facts: Facts, ours: list[Subnet]) -> Iterator[Finding]:
    for vpc in sorted({subnet.vpc for subnet in ours}):
        home = (facts.vpcs or {}).get(vpc)
        if home is not None and home.tenancy != "default":
            yield Finding(
                "vpc_tenancy",
                "error",
                f"{vpc} gives dedicated hardware only, where SageMaker cannot run",
                (f"{vpc}: InstanceTenancy {home.tenancy}",),
                fixes.make(
                    "tenancy",
                    "let new machines share hardware; those that run stay as they are",
                    region=needs.region,
                    vpc=vpc,
                    block=str(home.blocks[0]),
                ),
            )
