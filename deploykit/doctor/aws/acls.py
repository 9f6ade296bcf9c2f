"""The network ACLs around a job's subnets.

They keep no connections in mind, so both directions count; the first rule that fits decides. They
see only what enters or leaves a subnet: machines in one subnet talk past them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from deploykit.doctor import fixes
from deploykit.doctor.aws import routes, rules
from deploykit.doctor.aws.facts import LAST, Acl, Entry, Facts, Network, Subnet, ports
from deploykit.doctor.aws.needs import EPHEMERAL, HTTPS, Flow, Needs
from deploykit.doctor.aws.rules import Blocked
from deploykit.doctor.finding import Finding, Fix

_STEP = 10
_NAT_PORTS = (1024, 65535)
"""A NAT gateway takes its ports from here:
https://docs.aws.amazon.com/vpc/latest/userguide/vpc-network-acls.html (ephemeral ports)."""
_NUMBERS = {"tcp": "6", "udp": "17"}


@dataclass(frozen=True)
class _Crossing:
    """Packets that cross an ACL in one direction, and what they are for."""

    acl: Acl
    outbound: bool
    flow: Flow
    peer: Network
    purpose: str


def check(needs: Needs, facts: Facts) -> Iterator[Finding]:
    if facts.acls is None:
        return
    lost: dict[tuple[str, bool, Entry | None], list[tuple[_Crossing, Blocked]]] = {}
    for crossing in _crossings(needs, facts):
        entries = crossing.acl.outbound if crossing.outbound else crossing.acl.inbound
        for piece in rules.blocked(crossing.flow, crossing.peer, entries):
            key = (crossing.acl.id, crossing.outbound, piece.by)
            lost.setdefault(key, []).append((crossing, piece))
    for (_, _, by), pieces in lost.items():
        yield _finding(needs, by, pieces)


def _crossings(needs: Needs, facts: Facts) -> Iterator[_Crossing]:
    subnets = routes.ours(needs, facts)
    for subnet in subnets:
        acl = rules.of_subnet(facts.acls or (), subnet.id)
        if acl is None:
            continue
        for other in subnets:
            if other != subnet and not facts.efa:
                yield from _peers(needs, acl, other)
        yield from _outside(facts, acl, subnet)


def _peers(needs: Needs, acl: Acl, other: Subnet) -> Iterator[_Crossing]:
    for flow in needs.peers:
        for outbound in (False, True):
            purpose = f"the machines in {other.id}"
            yield _Crossing(acl, outbound, flow, other.block, purpose)


def _outside(facts: Facts, acl: Acl, subnet: Subnet) -> Iterator[_Crossing]:
    """HTTPS out and its answers in: to S3 or the internet, and to endpoints in other subnets."""
    table = routes.table_of(facts, subnet.id)
    if table is None:
        return
    internet = routes.reaches_internet(facts, table)
    if internet or routes.gateway(facts, table):
        blocks = facts.s3[1] if facts.s3 and not internet else ()
        for block in blocks or (rules.WORLD,):
            yield from _https(acl, block, "S3" if blocks else "S3 and the internet")
    for endpoint in facts.endpoints or ():
        for name in endpoint.subnets if endpoint.vpc == subnet.vpc else ():
            there = (facts.subnets or {}).get(name)
            if there is not None and there != subnet:
                yield from _https(acl, there.block, f"the endpoints in {name}")
    if internet:
        yield from _at_nat(facts, subnet)


def _https(acl: Acl, peer: Network, purpose: str) -> Iterator[_Crossing]:
    yield _Crossing(acl, True, Flow("tcp", (HTTPS,)), peer, purpose)
    yield _Crossing(acl, False, Flow("tcp", (EPHEMERAL,)), peer, f"answers of {purpose}")


def _at_nat(facts: Facts, subnet: Subnet) -> Iterator[_Crossing]:
    """What crosses the ACL of the NAT gateway's own subnet."""
    table = routes.table_of(facts, subnet.id)
    route = routes.default_route(table) if table else None
    nat = (facts.nats or {}).get(route.target) if route else None
    other = rules.of_subnet(facts.acls or (), nat.subnet) if nat else None
    if nat is None or other is None or nat.subnet == subnet.id:
        return
    purpose = f"{nat.id}, the way out of {subnet.id}"
    https, back = Flow("tcp", (HTTPS,)), Flow("tcp", (EPHEMERAL,))
    yield _Crossing(other, False, https, subnet.block, purpose)
    yield _Crossing(other, True, back, subnet.block, purpose)
    yield _Crossing(other, True, https, rules.WORLD, purpose)
    yield _Crossing(other, False, Flow("tcp", (_NAT_PORTS,)), rules.WORLD, purpose)


def _finding(needs: Needs, by: Entry | None, pieces: list[tuple[_Crossing, Blocked]]) -> Finding:
    acl, outbound = pieces[0][0].acl, pieces[0][0].outbound
    way = "outbound" if outbound else "inbound"
    merged = _merged([piece for _, piece in pieces])
    what = ", ".join(dict.fromkeys(ports(one.protocol, *one.ports) for one in merged))
    whom = " and ".join(dict.fromkeys(crossing.purpose for crossing, _ in pieces))
    decides = str(by) if by else "no rule fits, and the rest is denied"
    return Finding(
        f"acl_{way}",
        "error",
        f"{acl.id} stops {what} {way}: {whom}. ACLs know no connections, so requests and answers "
        "each need a rule",
        (f"{acl.id} {way}, {decides}",),
        _fix(needs, acl, by, merged, outbound=outbound),
    )


def _merged(pieces: list[Blocked]) -> list[Blocked]:
    """The pieces with adjoining ports joined."""
    found: list[Blocked] = []
    ordered = sorted(dict.fromkeys(pieces), key=lambda one: (one.protocol, one.peer, one.ports))
    for _, group in groupby(ordered, key=lambda one: (one.protocol, one.peer)):
        for one in group:
            last = found[-1] if found else None
            same = last is not None and (last.protocol, last.peer) == (one.protocol, one.peer)
            if last is not None and same and one.ports[0] <= last.ports[1] + 1:
                ends = (last.ports[0], max(last.ports[1], one.ports[1]))
                found[-1] = replace(last, ports=ends)
            else:
                found.append(one)
    return found


def _fix(needs: Needs, acl: Acl, by: Entry | None, lost: list[Blocked], *, outbound: bool) -> Fix:
    values = {"region": needs.region, "acl": acl.id, "outbound": outbound}
    numbers = _numbers(acl, by, len(lost), outbound=outbound)
    if len(numbers) < len(lost):
        number = by.number if by else LAST
        say = f"remove rule {number}: there is no free number before it"
        return fixes.make("acl-delete", say, **values, number=number)
    entries = [
        {
            "number": number,
            "protocol": _NUMBERS.get(one.protocol, one.protocol),
            "low": one.ports[0],
            "high": one.ports[1],
            "block": str(one.peer),
        }
        for number, one in zip(numbers, lost, strict=False)
    ]
    before = f"before rule {by.number}" if by and by.number < LAST else "before the last rule"
    return fixes.make("acl-entry", f"allow it {before}", **values, entries=entries)


def _numbers(acl: Acl, by: Entry | None, count: int, *, outbound: bool) -> list[int]:
    """Free rule numbers that are tried before `by`, as far from each other as others are."""
    taken = {entry.number for entry in (acl.outbound if outbound else acl.inbound)}
    limit = by.number if by else LAST
    highest = max((number for number in taken if number < limit), default=0)
    spaced = [highest + _STEP * step for step in range(1, count + 1)]
    if spaced and spaced[-1] < limit:
        return spaced
    free = [number for number in range(limit - 1, 0, -1) if number not in taken]
    return sorted(free[:count])
