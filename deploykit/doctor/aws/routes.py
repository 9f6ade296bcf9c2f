"""The ways out of a job's subnets: to S3, and to the internet."""

from __future__ import annotations

from collections.abc import Iterator

from deploykit.doctor import fixes
from deploykit.doctor.aws.facts import Endpoint, Facts, Nat, Route, Subnet, Table
from deploykit.doctor.aws.needs import Needs
from deploykit.doctor.finding import Finding, Fix

_ANYWHERE = "0.0.0.0/0"


def check(needs: Needs, facts: Facts) -> Iterator[Finding]:
    if facts.tables is None or facts.endpoints is None or facts.nats is None:
        return
    tables = {table.id: table for table in map_tables(needs, facts)}
    for table in tables.values():
        if (found := _broken(needs, facts, table)) is not None:
            yield found
        elif not reaches_s3(facts, table):
            yield _no_s3(needs, facts, table)


def ours(needs: Needs, facts: Facts) -> list[Subnet]:
    """The job's subnets that exist and lie in its VPC."""
    known = facts.subnets or {}
    there = [known[name] for name in needs.subnets if name in known]
    return [subnet for subnet in there if subnet.vpc == home(needs, facts)]


def home(needs: Needs, facts: Facts) -> str | None:
    """The VPC of the job: that of a subnet whose VPC has one of the groups, else of the first."""
    known, groups = facts.subnets or {}, facts.groups or {}
    vpcs = [known[name].vpc for name in needs.subnets if name in known]
    theirs = {groups[name].vpc for name in needs.groups if name in groups}
    return next((vpc for vpc in vpcs if vpc in theirs), next(iter(vpcs), None))


def map_tables(needs: Needs, facts: Facts) -> list[Table]:
    found = (table_of(facts, subnet.id) for subnet in ours(needs, facts))
    return [table for table in found if table is not None]


def table_of(facts: Facts, subnet: str) -> Table | None:
    """The route table of a subnet: its own, else the main one of its VPC."""
    known = (facts.subnets or {}).get(subnet)
    tables = facts.tables or ()
    own = next((table for table in tables if subnet in table.subnets), None)
    if own is not None or known is None:
        return own
    return next((table for table in tables if table.main and table.vpc == known.vpc), None)


def default_route(table: Table) -> Route | None:
    return next((route for route in table.routes if route.destination == _ANYWHERE), None)


def is_public(facts: Facts, subnet: str) -> bool:
    """Whether the default route of a subnet leads to an internet gateway."""
    table = table_of(facts, subnet)
    route = None if table is None else default_route(table)
    return route is not None and route.works and route.target.startswith("igw-")


def reaches_internet(facts: Facts, table: Table) -> bool:
    """Whether machines without a public address, as SageMaker's are, come out through `table`."""
    route = default_route(table)
    return (
        route is not None
        and not route.target.startswith("igw-")
        and _why_broken(facts, route) is None
    )


def gateway(facts: Facts, table: Table) -> Endpoint | None:
    """The gateway endpoint for S3 that `table` leads to."""
    return next((one for one in _gateways(facts, table.vpc) if table.id in one.tables), None)


def reaches_s3(facts: Facts, table: Table) -> bool:
    private = any(
        one.service == "s3" and not one.gateway and one.works and one.answers_for_name
        for one in facts.endpoints or ()
        if one.vpc == table.vpc
    )
    return private or gateway(facts, table) is not None or reaches_internet(facts, table)


def _gateways(facts: Facts, vpc: str) -> list[Endpoint]:
    return [
        one
        for one in facts.endpoints or ()
        if one.service == "s3" and one.gateway and one.works and one.vpc == vpc
    ]


def _why_broken(facts: Facts, route: Route) -> str | None:
    """Why a default route leads nowhere; None where it leads out, or nobody can tell."""
    if not route.works:
        return f"{route.target or 'its target'} is gone"
    if not route.target.startswith("nat-"):
        return None
    nat = (facts.nats or {}).get(route.target)
    if nat is None or nat.state not in {"available", "pending"}:
        return f"{route.target} is {nat.state if nat else 'gone'}"
    if not is_public(facts, nat.subnet):
        return f"{nat.id} stands in {nat.subnet}, which has no route to an internet gateway"
    return None


def _broken(needs: Needs, facts: Facts, table: Table) -> Finding | None:
    route = default_route(table)
    why = None if route is None else _why_broken(facts, route)
    if route is None or why is None:
        return None
    s3 = gateway(facts, table) is not None
    lost = "the internet" if s3 else "S3 and the internet"
    return Finding(
        "nat_broken",
        "warning" if s3 else "error",
        f"the way to {lost} is broken: {why}",
        (f"{table.id}: {_ANYWHERE} -> {route.target or 'nothing'}, {_state(route)}",),
        _nat_fix(needs, facts, table),
    )


def _state(route: Route) -> str:
    return "active" if route.works else "blackhole"


def _nat_fix(needs: Needs, facts: Facts, table: Table) -> Fix:
    nat = _working_nat(facts, table.vpc)
    if nat is not None:
        return fixes.make(
            "nat-route",
            f"lead the route to {nat.id}, which works",
            region=needs.region,
            table=table.id,
            nat=nat.id,
        )
    public = next(
        (
            subnet.id
            for subnet in (facts.subnets or {}).values()
            if subnet.vpc == table.vpc and is_public(facts, subnet.id)
        ),
        None,
    )
    if public is None:
        return Fix("make a public subnet with an internet gateway, and a NAT gateway in it")
    return fixes.make(
        "nat",
        f"make a NAT gateway in {public} (billed by the hour) and lead the route to it",
        region=needs.region,
        table=table.id,
        subnet=public,
    )


def _working_nat(facts: Facts, vpc: str) -> Nat | None:
    return next(
        (
            nat
            for nat in (facts.nats or {}).values()
            if nat.vpc == vpc and nat.state == "available" and is_public(facts, nat.subnet)
        ),
        None,
    )


def _no_s3(needs: Needs, facts: Facts, table: Table) -> Finding:
    route = default_route(table)
    why = "no gateway endpoint, and no NAT gateway"
    if route is not None and route.target.startswith("igw-"):
        why = f"{route.target} serves public addresses only, and the job's machines have none"
    used_by = [s.id for s in ours(needs, facts) if table_of(facts, s.id) == table]
    return Finding(
        "s3_route",
        "error",
        f"no way to S3 from {', '.join(used_by)}: {why}. The job ends with `Data download failed`",
        (f"{table.id}: {_routes(table)}", *_elsewhere(facts, table)),
        _s3_fix(needs, facts, table),
    )


def _routes(table: Table) -> str:
    listed = (f"{route.destination} -> {route.target}" for route in table.routes)
    return ", ".join(listed) or "no routes"


def _elsewhere(facts: Facts, table: Table) -> Iterator[str]:
    for one in _gateways(facts, table.vpc):
        yield f"{one.id} (S3) is only for {', '.join(one.tables) or 'no route table'}"


def _s3_fix(needs: Needs, facts: Facts, table: Table) -> Fix:
    there = next(iter(_gateways(facts, table.vpc)), None)
    values = {"region": needs.region, "vpc": table.vpc}
    if there is None:
        say = "make a gateway endpoint for S3 (free of charge)"
        return fixes.make("s3-endpoint", say, **values, tables=[table.id])
    return fixes.make(
        "s3-endpoint-table",
        f"let {there.id} serve {table.id} too",
        **values,
        endpoint=there.id,
        table=table.id,
        tables=[*there.tables, table.id],
    )
