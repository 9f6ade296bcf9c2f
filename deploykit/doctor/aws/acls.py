"""Checks of the network ACLs of a job's subnets.

ACLs are stateless, so requests and responses each need a rule; the first rule that matches
decides. They filter only traffic that enters or leaves a subnet, not traffic inside one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from deploykit.doctor import fixes
from deploykit.doctor.aws import packet_filters, routes
from deploykit.doctor.aws.inventory import (
    LAST,
    AclEntry,
    Inventory,
    Network,
    NetworkAcl,
    Subnet,
    ports,
)
from deploykit.doctor.aws.packet_filters import Blocked
from deploykit.doctor.aws.requirements import EPHEMERAL, HTTPS, Flow, Requirements
from deploykit.lib.finding import Finding, Fix

_STEP = 10
_NAT_PORTS = (1024, 65535)
"""A NAT gateway picks its ports from this range:
https://docs.aws.amazon.com/vpc/latest/userguide/vpc-network-acls.html (ephemeral ports)."""
_NUMBERS = {"tcp": "6", "udp": "17"}


@dataclass(frozen=True)
class _Crossing:
    """Packets that cross an ACL in one direction, and their purpose for messages."""

    acl: NetworkAcl
    outbound: bool
    flow: Flow
    peer: Network
    purpose: str


def findings(requirements: Requirements, inventory: Inventory) -> Iterator[Finding]:
    """One finding for each ACL rule that drops traffic of the job."""
    if inventory.acls is None:
        return
    dropped: dict[tuple[str, bool, AclEntry | None], list[tuple[_Crossing, Blocked]]] = {}
    for crossing in _crossings(requirements, inventory):
        entries = crossing.acl.outbound if crossing.outbound else crossing.acl.inbound
        for piece in packet_filters.blocked(crossing.flow, crossing.peer, entries):
            key = (crossing.acl.id, crossing.outbound, piece.by)
            dropped.setdefault(key, []).append((crossing, piece))
    for (_, _, by), pieces in dropped.items():
        yield _finding(requirements, by, pieces)


def _crossings(requirements: Requirements, inventory: Inventory) -> Iterator[_Crossing]:
    subnets = routes.subnets_of_job(requirements, inventory)
    for subnet in subnets:
        acl = packet_filters.of_subnet(inventory.acls or (), subnet.id)
        if acl is None:
            continue
        for other in subnets:
            if other != subnet and not requirements.efa:
                yield from _peers(requirements, acl, other)
        yield from _outside(inventory, acl, subnet)


def _peers(requirements: Requirements, acl: NetworkAcl, other: Subnet) -> Iterator[_Crossing]:
    for flow in requirements.peers:
        for outbound in (False, True):
            purpose = f"the nodes in {other.id}"
            yield _Crossing(acl, outbound, flow, other.block, purpose)


def _outside(inventory: Inventory, acl: NetworkAcl, subnet: Subnet) -> Iterator[_Crossing]:
    """HTTPS requests and responses: to S3 or the internet, and to endpoints in other subnets."""
    table = routes.table_of(inventory, subnet.id)
    if table is None:
        return
    internet = routes.reaches_internet(inventory, table)
    if internet or routes.gateway(inventory, table):
        blocks = inventory.s3[1] if inventory.s3 and not internet else ()
        for block in blocks or (packet_filters.WORLD,):
            yield from _https(acl, block, "S3" if blocks else "S3 and the internet")
    for endpoint in inventory.endpoints or ():
        for name in endpoint.subnets if endpoint.vpc == subnet.vpc else ():
            other = (inventory.subnets or {}).get(name)
            if other is not None and other != subnet:
                yield from _https(acl, other.block, f"the endpoints in {name}")
    if internet:
        yield from _at_nat(inventory, subnet)


def _https(acl: NetworkAcl, peer: Network, purpose: str) -> Iterator[_Crossing]:
    yield _Crossing(acl, True, Flow("tcp", (HTTPS,)), peer, purpose)
    yield _Crossing(acl, False, Flow("tcp", (EPHEMERAL,)), peer, f"responses of {purpose}")


def _at_nat(inventory: Inventory, subnet: Subnet) -> Iterator[_Crossing]:
    """Traffic that crosses the ACL of the NAT gateway's subnet."""
    table = routes.table_of(inventory, subnet.id)
    route = routes.default_route(table) if table else None
    nat = (inventory.nats or {}).get(route.target) if route else None
    other = packet_filters.of_subnet(inventory.acls or (), nat.subnet) if nat else None
    if nat is None or other is None or nat.subnet == subnet.id:
        return
    purpose = f"{nat.id}, the NAT gateway of {subnet.id}"
    https, back = Flow("tcp", (HTTPS,)), Flow("tcp", (EPHEMERAL,))
    yield _Crossing(other, False, https, subnet.block, purpose)
    yield _Crossing(other, True, back, subnet.block, purpose)
    yield _Crossing(other, True, https, packet_filters.WORLD, purpose)
    yield _Crossing(other, False, Flow("tcp", (_NAT_PORTS,)), packet_filters.WORLD, purpose)


def _finding(
    requirements: Requirements, by: AclEntry | None, pieces: list[tuple[_Crossing, Blocked]]
) -> Finding:
    acl, outbound = pieces[0][0].acl, pieces[0][0].outbound
    way = "outbound" if outbound else "inbound"
    merged = _merged([piece for _, piece in pieces])
    traffic = ", ".join(dict.fromkeys(ports(one.protocol, *one.ports) for one in merged))
    purposes = " and ".join(dict.fromkeys(crossing.purpose for crossing, _ in pieces))
    decision = str(by) if by else "no rule matches, so the default rule denies it"
    return Finding(
        f"acl_{way}",
        "error",
        f"{acl.id} blocks {traffic} {way}: {purposes}. ACLs are stateless: requests and responses "
        "each need a rule",
        (f"{acl.id} {way}, {decision}",),
        _fix(requirements, acl, by, merged, outbound=outbound),
    )


def _merged(pieces: list[Blocked]) -> list[Blocked]:
    """The pieces, with adjacent port ranges merged."""
    merged: list[Blocked] = []
    ordered = sorted(dict.fromkeys(pieces), key=lambda one: (one.protocol, one.peer, one.ports))
    for _, group in groupby(ordered, key=lambda one: (one.protocol, one.peer)):
        for one in group:
            last = merged[-1] if merged else None
            same = last is not None and (last.protocol, last.peer) == (one.protocol, one.peer)
            if last is not None and same and one.ports[0] <= last.ports[1] + 1:
                ends = (last.ports[0], max(last.ports[1], one.ports[1]))
                merged[-1] = replace(last, ports=ends)
            else:
                merged.append(one)
    return merged


def _fix(
    requirements: Requirements,
    acl: NetworkAcl,
    by: AclEntry | None,
    blocked: list[Blocked],
    *,
    outbound: bool,
) -> Fix:
    values = {"region": requirements.region, "acl": acl.id, "outbound": outbound}
    numbers = _numbers(acl, by, len(blocked), outbound=outbound)
    if len(numbers) < len(blocked):
        number = by.number if by else LAST
        summary = f"remove rule {number}: no lower rule number is free"
        return fixes.make("acl-delete", summary, **values, number=number)
    entries = [
        {
            "number": number,
            "protocol": _NUMBERS.get(one.protocol, one.protocol),
            "low": one.ports[0],
            "high": one.ports[1],
            "block": str(one.peer),
        }
        for number, one in zip(numbers, blocked, strict=False)
    ]
    before = f"before rule {by.number}" if by and by.number < LAST else "before the last rule"
    return fixes.make("acl-entry", f"add an allow rule {before}", **values, entries=entries)


def _numbers(acl: NetworkAcl, by: AclEntry | None, count: int, *, outbound: bool) -> list[int]:
    """Free rule numbers lower than that of `by`, in steps of 10 if they fit."""
    taken = {entry.number for entry in (acl.outbound if outbound else acl.inbound)}
    limit = by.number if by else LAST
    highest = max((number for number in taken if number < limit), default=0)
    spaced = [highest + _STEP * step for step in range(1, count + 1)]
    if spaced and spaced[-1] < limit:
        return spaced
    free = [number for number in range(limit - 1, 0, -1) if number not in taken]
    return sorted(free[:count])
