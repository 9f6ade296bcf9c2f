"""Checks of the routes from a job's subnets to S3 and to the internet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deploykit.doctor import fixes
from deploykit.doctor.aws.inventory import (
    Endpoint,
    Inventory,
    NatGateway,
    Route,
    RouteTable,
    Subnet,
)
from deploykit.doctor.aws.requirements import Requirements
from deploykit.lib.finding import Finding, Fix

_ANYWHERE = "0.0.0.0/0"


def findings(requirements: Requirements, inventory: Inventory) -> Iterator[Finding]:
    """Broken NAT routes, and subnets that cannot reach S3."""
    if inventory.tables is None or inventory.endpoints is None or inventory.nats is None:
        return
    tables = {table.id: table for table in tables_of_job(requirements, inventory)}
    for table in tables.values():
        if (broken := _broken_nat(requirements, inventory, table)) is not None:
            yield broken
        elif not reaches_s3(inventory, table):
            yield _no_s3(requirements, inventory, table)


def subnets_of_job(requirements: Requirements, inventory: Inventory) -> list[Subnet]:
    """The job's subnets that exist in its VPC."""
    known = inventory.subnets or {}
    existing = [known[name] for name in requirements.subnets if name in known]
    return [subnet for subnet in existing if subnet.vpc == vpc_of_job(requirements, inventory)]


def vpc_of_job(requirements: Requirements, inventory: Inventory) -> str | None:
    """The VPC of the first subnet that is in one with a security group, else of the first one."""
    known, groups = inventory.subnets or {}, inventory.groups or {}
    vpcs = [known[name].vpc for name in requirements.subnets if name in known]
    group_vpcs = {groups[name].vpc for name in requirements.groups if name in groups}
    return next((vpc for vpc in vpcs if vpc in group_vpcs), next(iter(vpcs), None))


def tables_of_job(requirements: Requirements, inventory: Inventory) -> list[RouteTable]:
    """The route tables of the job's subnets, one for each subnet."""
    tables = (table_of(inventory, subnet.id) for subnet in subnets_of_job(requirements, inventory))
    return [table for table in tables if table is not None]


def table_of(inventory: Inventory, subnet: str) -> RouteTable | None:
    """The route table of a subnet: the associated one, else the main one of its VPC."""
    known = (inventory.subnets or {}).get(subnet)
    tables = inventory.tables or ()
    own = next((table for table in tables if subnet in table.subnets), None)
    if own is not None or known is None:
        return own
    return next((table for table in tables if table.main and table.vpc == known.vpc), None)


def default_route(table: RouteTable) -> Route | None:
    """The route to 0.0.0.0/0, if there is one."""
    return next((route for route in table.routes if route.destination == _ANYWHERE), None)


def is_public(inventory: Inventory, subnet: str) -> bool:
    """Whether the default route of a subnet targets an internet gateway."""
    table = table_of(inventory, subnet)
    route = None if table is None else default_route(table)
    return route is not None and route.works and route.target.startswith("igw-")


def reaches_internet(inventory: Inventory, table: RouteTable) -> bool:
    """Whether `table` gives internet access to instances without a public IP, like SageMaker's."""
    route = default_route(table)
    return (
        route is not None
        and not route.target.startswith("igw-")
        and _why_broken(inventory, route) is None
    )


def gateway(inventory: Inventory, table: RouteTable) -> Endpoint | None:
    """The S3 gateway endpoint that is associated with `table`."""
    return next((one for one in _gateways(inventory, table.vpc) if table.id in one.tables), None)


def reaches_s3(inventory: Inventory, table: RouteTable) -> bool:
    """Whether S3 is reachable by an endpoint or over the internet."""
    private = any(
        one.service == "s3" and not one.gateway and one.works and one.private_dns
        for one in inventory.endpoints or ()
        if one.vpc == table.vpc
    )
    return private or gateway(inventory, table) is not None or reaches_internet(inventory, table)


def _gateways(inventory: Inventory, vpc: str) -> list[Endpoint]:
    return [
        one
        for one in inventory.endpoints or ()
        if one.service == "s3" and one.gateway and one.works and one.vpc == vpc
    ]


def _why_broken(inventory: Inventory, route: Route) -> str | None:
    """Why a default route is broken; None if it works or that is unknown."""
    if not route.works:
        return f"{route.target or 'its target'} does not exist"
    if not route.target.startswith("nat-"):
        return None
    nat = (inventory.nats or {}).get(route.target)
    if nat is None or nat.state not in {"available", "pending"}:
        return f"{route.target} {f'is {nat.state}' if nat else 'does not exist'}"
    if not is_public(inventory, nat.subnet):
        return f"{nat.id} is in {nat.subnet}, which has no route to an internet gateway"
    return None


def _broken_nat(
    requirements: Requirements, inventory: Inventory, table: RouteTable
) -> Finding | None:
    route = default_route(table)
    why = None if route is None else _why_broken(inventory, route)
    if route is None or why is None:
        return None
    s3 = gateway(inventory, table) is not None
    unreachable = "the internet" if s3 else "S3 and the internet"
    return Finding(
        "nat_broken",
        "warning" if s3 else "error",
        f"the route to {unreachable} is broken: {why}",
        (f"{table.id}: {_ANYWHERE} -> {route.target or 'nothing'}, {_state(route)}",),
        _nat_fix(requirements, inventory, table),
    )


def _state(route: Route) -> str:
    return "active" if route.works else "blackhole"


def _nat_fix(requirements: Requirements, inventory: Inventory, table: RouteTable) -> Fix:
    nat = _working_nat(inventory, table.vpc)
    if nat is not None:
        return fixes.make(
            "nat-route",
            f"route to {nat.id}, which works",
            region=requirements.region,
            table=table.id,
            nat=nat.id,
        )
    public = next(
        (
            subnet.id
            for subnet in (inventory.subnets or {}).values()
            if subnet.vpc == table.vpc and is_public(inventory, subnet.id)
        ),
        None,
    )
    if public is None:
        way_out = "create a public subnet with an internet gateway, and a NAT gateway in it"
        if gateway(inventory, table) is not None:
            return Fix(way_out)
        s3 = _s3_fix(requirements, inventory, table)
        return replace(s3, summary=f"{s3.summary}; for the internet as well: {way_out}")
    return fixes.make(
        "nat",
        f"create a NAT gateway in {public} (billed by the hour) and route to it",
        region=requirements.region,
        table=table.id,
        subnet=public,
    )


def _working_nat(inventory: Inventory, vpc: str) -> NatGateway | None:
    return next(
        (
            nat
            for nat in (inventory.nats or {}).values()
            if nat.vpc == vpc and nat.state == "available" and is_public(inventory, nat.subnet)
        ),
        None,
    )


def _no_s3(requirements: Requirements, inventory: Inventory, table: RouteTable) -> Finding:
    route = default_route(table)
    why = "no gateway endpoint, and no NAT gateway"
    if route is not None and route.target.startswith("igw-"):
        why = f"{route.target} serves only public IPs, and instances of the job have none"
    used_by = [
        s.id for s in subnets_of_job(requirements, inventory) if table_of(inventory, s.id) == table
    ]
    return Finding(
        "s3_route",
        "error",
        f"no route to S3 from {', '.join(used_by)}: {why}. "
        "The job fails with `Data download failed`",
        (f"{table.id}: {_routes(table)}", *_other_gateways(inventory, table)),
        _s3_fix(requirements, inventory, table),
    )


def _routes(table: RouteTable) -> str:
    listed = (f"{route.destination} -> {route.target}" for route in table.routes)
    return ", ".join(listed) or "no routes"


def _other_gateways(inventory: Inventory, table: RouteTable) -> Iterator[str]:
    for one in _gateways(inventory, table.vpc):
        yield f"{one.id} (S3) serves only {', '.join(one.tables) or 'no route table'}"


def _s3_fix(requirements: Requirements, inventory: Inventory, table: RouteTable) -> Fix:
    gateway_endpoint = next(iter(_gateways(inventory, table.vpc)), None)
    if gateway_endpoint is None:
        summary = "create a gateway endpoint for S3 (free of charge)"
        return fixes.make(
            "s3-endpoint", summary, region=requirements.region, vpc=table.vpc, table=table.id
        )
    return fixes.make(
        "s3-endpoint-table",
        f"associate {gateway_endpoint.id} with {table.id}",
        region=requirements.region,
        endpoint=gateway_endpoint.id,
        table=table.id,
    )
