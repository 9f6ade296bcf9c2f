"""Packets that security groups and network ACLs drop: between the nodes of a job, and to AWS.

A packet passes security groups if any rule of any group of the node allows it; its answer passes as
well. ACLs are stateless, so requests and responses each need a rule; the first rule that matches
decides. ACLs filter only traffic that enters or leaves a subnet, not traffic inside one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from itertools import groupby

from deploykit.doctor import fixes
from deploykit.doctor.network import (
    ANYWHERE,
    LAST,
    PEERS,
    AclEntry,
    Network,
    NetworkAcl,
    SecurityGroup,
    SecurityGroupRule,
    Subnet,
    ports,
)
from deploykit.doctor.requirements import ANY, EPHEMERAL, HTTPS, Flow, Ports
from deploykit.lib.finding import Finding, Fix

WORLD = IPv4Network(ANYWHERE)
_PUBLIC = IPv4Address("1.1.1.1")
_DIRECTIONS = {False: ("inbound", "from"), True: ("outbound", "to")}
_ALL, _HTTPS, _ANSWERS = Flow("-1"), Flow("tcp", (HTTPS,)), Flow("tcp", (EPHEMERAL,))
_AT_NAT = Flow("tcp", ((1024, 65535),))
"""A NAT gateway picks its ports from this range:
https://docs.aws.amazon.com/vpc/latest/userguide/vpc-network-acls.html (ephemeral ports)."""
_NUMBER_STEP = 10
_PROTOCOL_NUMBERS = {"tcp": "6", "udp": "17"}


def _rules(groups: Iterable[SecurityGroup], *, outbound: bool) -> list[SecurityGroupRule]:
    return [rule for group in groups for rule in group.rules[outbound]]


def missing_ports(
    flow: Flow, rules: Iterable[SecurityGroupRule], members: Collection[str], block: IPv4Network
) -> list[Ports]:
    """The ports of `flow` that no rule opens for `block`, whose hosts are in groups `members`."""
    opened = sorted(
        (rule.low, rule.high)
        for rule in rules
        if rule.protocol in {"-1", flow.protocol}
        and (rule.peer in members or ("/" in rule.peer and block.subnet_of(IPv4Network(rule.peer))))
    )
    return [left for wanted in flow.ports for left in _without(wanted, opened)]


def _without(wanted: Ports, opened: Sequence[Ports]) -> Iterator[Ports]:
    low, high = wanted
    for first, last in opened:
        if last < low or first > high:
            continue
        if first > low:
            yield low, first - 1
        low = max(low, last + 1)
    if low <= high:
        yield low, high


def admits_https(groups: Iterable[SecurityGroup], members: set[str], block: IPv4Network) -> bool:
    """Whether groups admit HTTPS from hosts in `block` that belong to groups `members`."""
    return not missing_ports(_HTTPS, _rules(groups, outbound=False), members, block)


@dataclass(frozen=True)
class Blocked:
    """Packets that an ACL drops: protocol, ports, peer, and the deciding rule (None: default)."""

    protocol: str
    ports: Ports
    peer: IPv4Network
    by: AclEntry | None


def blocked(flow: Flow, peer: IPv4Network, entries: Sequence[AclEntry]) -> list[Blocked]:
    """The part of `flow`, from or to `peer`, that an ACL denies by its first matching entry.

    The entries split ports and addresses into ranges; one port and one address of each range are
    tried. If `peer` is the whole internet, only public addresses count.
    """
    last_ports: dict[tuple[int, AclEntry | None], int] = {}
    for low, high in flow.ports:
        for first, last in _port_ranges(low, high, entries):
            for address in _addresses(peer, entries):
                by = _deciding_entry(entries, flow.protocol, first, address)
                if by is None or not by.allow:
                    last_ports.setdefault((first, by), last)
    return [
        Blocked(flow.protocol, (first, last), peer, by) for (first, by), last in last_ports.items()
    ]


def _deciding_entry(
    entries: Sequence[AclEntry], protocol: str, port: int, address: IPv4Address
) -> AclEntry | None:
    matching = (
        entry
        for entry in entries
        if entry.protocol in {"-1", protocol}
        and entry.low <= port <= entry.high
        and address in entry.block
    )
    return next(matching, None)


def _port_ranges(low: int, high: int, entries: Sequence[AclEntry]) -> Iterator[Ports]:
    starts = {low, *(edge for entry in entries for edge in (entry.low, entry.high + 1))}
    kept = sorted(start for start in starts if low <= start <= high)
    yield from zip(kept, [*(start - 1 for start in kept[1:]), high], strict=True)


def _addresses(peer: IPv4Network, entries: Sequence[AclEntry]) -> Iterator[IPv4Address]:
    edges = {edge for e in entries for edge in (int(e.block[0]), int(e.block[-1]) + 1)}
    first, last = int(peer[0]), int(peer[-1])
    tried = [first, *(edge for edge in sorted(edges) if first < edge <= last)]
    addresses = [IPv4Address(edge) for edge in tried]
    if peer == WORLD:
        yield _PUBLIC
        addresses = [address for address in addresses if address.is_global]
    yield from addresses


def group_findings(network: Network) -> Iterator[Finding]:
    job, subnets = network.job, network.job_subnets
    if not network.answered("describe-security-groups") or not subnets:
        return
    missing = [name for name in job.groups if name not in network.groups]
    if missing:
        yield Finding(
            "group_not_found",
            "error",
            f"security group not found in this account in {job.region}: {', '.join(missing)}",
            (f"sagemaker.security_group_ids: {', '.join(job.groups)}",),
            _replacement(network),
        )
    foreign = [group for group in network.existing_groups if group.vpc != network.vpc]
    if foreign:
        yield Finding(
            "group_vpc",
            "error",
            f"{', '.join(group.id for group in foreign)} and the subnets are in different VPCs",
            (
                *(f"{group.id}: {group.vpc}" for group in foreign),
                f"{subnets[0].id}: {subnets[0].vpc}",
            ),
            _replacement(network),
        )
    if network.job_groups:
        for outbound in (False, True):
            yield from _between_nodes(network, outbound=outbound)
        yield from _to_s3(network)


def _replacement(network: Network) -> Fix:
    """A group of the VPC that allows all traffic among its members, else a new one."""
    for group in network.groups.values():
        both = all(_allows_members([group], outbound=outbound) for outbound in (False, True))
        if group.vpc == network.vpc and both:
            summary = f"use {group.id}, which allows all traffic between its members"
            return fixes.job_file(summary, security_group_ids=[group.id])
    summary = f"create a group in {network.vpc} that allows all traffic between its members"
    return network.fix("group", summary, vpc=network.vpc)


def _allows_members(groups: Sequence[SecurityGroup], *, outbound: bool) -> bool:
    """Whether a rule that names a group allows all traffic among members, as EFA requires."""
    members = {group.id for group in groups}
    return any(
        rule.protocol == "-1" and rule.peer in members for rule in _rules(groups, outbound=outbound)
    )


def _between_nodes(network: Network, *, outbound: bool) -> Iterator[Finding]:
    job, groups = network.job, network.job_groups
    if job.nodes == 1:
        return
    way, towards = _DIRECTIONS[outbound]
    finding = partial(_rule_missing, network, outbound=outbound)
    if job.efa is not False and not _allows_members(groups, outbound=outbound):
        message = (
            f"EFA ({job.instance_type}) requires an {way} rule for all traffic {towards} the group "
            "itself; rules for CIDR blocks do not match EFA traffic"
        )
        if job.efa:
            yield finding(f"efa_{way}", message, [_ALL])
        else:
            message = (
                f"AWS does not document whether SageMaker uses EFA here. If so, {message}. "
                "TCP does not need this rule"
            )
            yield replace(finding(f"efa_{way}", message, [_ALL]), severity="warning")
    if job.efa:
        return
    members = [group.id for group in groups]
    rules = _rules(groups, outbound=outbound)
    dropped = []
    for flow in job.peers:
        blocks = [subnet.block for subnet in network.job_subnets]
        left = {port for block in blocks for port in missing_ports(flow, rules, members, block)}
        dropped += [Flow(flow.protocol, tuple(sorted(left)))] if left else []
    if plain := [flow for flow in dropped if flow.protocol == "tcp"]:
        reason = ", so init_process_group times out. NCCL and Gloo listen on any port from 32768 up"
        yield finding(f"peers_{way}", f"{_blocked_traffic(plain, way)}{reason}", plain)
    if encryption := [flow for flow in dropped if flow.protocol != "tcp"]:
        reason = ", which inter-container traffic encryption requires"
        yield finding(
            f"encryption_{way}", f"{_blocked_traffic(encryption, way)}{reason}", encryption
        )


def _blocked_traffic(flows: list[Flow], way: str) -> str:
    traffic = ", ".join(ports(flow.protocol, *piece) for flow in flows for piece in flow.ports)
    return f"the security groups block {way} {traffic} between the nodes"


def _rule_missing(
    network: Network, code: str, message: str, flows: list[Flow], *, outbound: bool
) -> Finding:
    """A finding whose fix allows `flows` between members of the job's first group.

    All ports of TCP, since other frameworks use other ports.
    """
    group = network.job_groups[0].id
    allowed = [Flow("tcp") if flow.protocol == "tcp" else flow for flow in flows]
    names = [ports(flow.protocol, *ANY) for flow in allowed if flow.protocol != "udp"]
    names += ["udp 500"] if any(flow.protocol == "udp" for flow in allowed) else []
    _, towards = _DIRECTIONS[outbound]
    return Finding(
        code,
        "error",
        message,
        tuple(_listed(member, outbound=outbound) for member in network.job_groups),
        rule_fix(
            network,
            group,
            f"allow {', '.join(names)} {towards} {group} itself",
            [(flow, group) for flow in allowed],
            outbound=outbound,
        ),
    )


def rule_fix(
    network: Network,
    group: str,
    summary: str,
    allowed: Iterable[tuple[Flow, str]],
    *,
    outbound: bool,
) -> Fix:
    """A fix that adds a rule to `group` for each flow and its peer."""
    permissions = [_permission(flow, peer) for flow, peer in allowed]
    return network.fix(
        "group_rule", summary, group=group, outbound=outbound, permissions=permissions
    )


def _permission(flow: Flow, peer: str) -> dict[str, object]:
    """An IpPermission of EC2's API; ports are -1 for a protocol that has none."""
    low, high = flow.ports[0] if flow.protocol in {"tcp", "udp"} else (-1, -1)
    limits = {} if flow.protocol == "-1" else {"FromPort": low, "ToPort": high}
    kinds = {"sg-": "UserIdGroupPairs", "pl-": "PrefixListIds"}
    key = kinds.get(peer[:3], "IpRanges")
    return {"IpProtocol": flow.protocol, **limits, key: [{PEERS[key]: peer}]}


def _listed(group: SecurityGroup, *, outbound: bool) -> str:
    way, towards = _DIRECTIONS[outbound]
    listed = "; ".join(
        f"{ports(rule.protocol, rule.low, rule.high)} {towards} {rule.peer}"
        for rule in group.rules[outbound]
    )
    return f"{group.id} {way}: {listed or 'no rules'}"


def _to_s3(network: Network) -> Iterator[Finding]:
    """HTTPS to S3, which every job requires. Missing routes are reported by `routes`."""
    tables, groups = network.job_tables, network.job_groups
    if not any(map(network.reaches_s3, tables)):
        return
    rules = _rules(groups, outbound=True)
    prefix_list = network.s3_prefix_list
    blocks = network.s3_blocks or (WORLD,)
    if not any(missing_ports(_HTTPS, rules, {prefix_list}, block) for block in blocks):
        return
    private = prefix_list and all(map(network.s3_gateway, tables))
    peer = "S3's prefix list" if private else ANYWHERE
    summary = f"allow tcp 443 to {peer}"
    yield Finding(
        "s3_outbound",
        "error",
        "the security groups block HTTPS (tcp 443) to S3, which holds the source and the data",
        tuple(_listed(group, outbound=True) for group in groups),
        rule_fix(
            network,
            groups[0].id,
            summary,
            [(_HTTPS, prefix_list if private else ANYWHERE)],
            outbound=True,
        ),
    )


@dataclass(frozen=True)
class _Crossing:
    """Packets that cross an ACL in one direction, and their purpose for messages."""

    acl: NetworkAcl
    outbound: bool
    flow: Flow
    peer: IPv4Network
    purpose: str


def acl_findings(network: Network) -> Iterator[Finding]:
    """One finding for each ACL rule that drops traffic of the job."""
    dropped: dict[tuple[str, bool, AclEntry | None], list[tuple[_Crossing, Blocked]]] = {}
    for crossing in _crossings(network):
        entries = crossing.acl.entries[crossing.outbound]
        for piece in blocked(crossing.flow, crossing.peer, entries):
            key = (crossing.acl.id, crossing.outbound, piece.by)
            dropped.setdefault(key, []).append((crossing, piece))
    for (_, _, by), pieces in dropped.items():
        yield _acl_finding(network, by, pieces)


def _crossings(network: Network) -> Iterator[_Crossing]:
    for subnet in network.job_subnets:
        acl = network.acl_of(subnet.id)
        if acl is None:
            continue
        for other in network.job_subnets:
            for flow in () if other == subnet or network.job.efa else network.job.peers:
                for outbound in (False, True):
                    yield _Crossing(acl, outbound, flow, other.block, f"the nodes in {other.id}")
        yield from _outside(network, acl, subnet)


def _outside(network: Network, acl: NetworkAcl, subnet: Subnet) -> Iterator[_Crossing]:
    """HTTPS requests and responses: to S3 or the internet, and to endpoints in other subnets."""
    table = network.table_of(subnet.id)
    if table is None:
        return
    internet = network.reaches_internet(table)
    if internet or network.s3_gateway(table):
        blocks = () if internet else network.s3_blocks
        for block in blocks or (WORLD,):
            yield from _https(acl, block, "S3" if blocks else "S3 and the internet")
    for endpoint in network.endpoints:
        for name in endpoint.subnets if endpoint.vpc == subnet.vpc else ():
            other = network.subnets.get(name)
            if other is not None and other != subnet:
                yield from _https(acl, other.block, f"the endpoints in {name}")
    if internet:
        yield from _at_nat(network, subnet)


def _https(acl: NetworkAcl, peer: IPv4Network, purpose: str) -> Iterator[_Crossing]:
    yield _Crossing(acl, True, _HTTPS, peer, purpose)
    yield _Crossing(acl, False, _ANSWERS, peer, f"responses from {purpose}")


def _at_nat(network: Network, subnet: Subnet) -> Iterator[_Crossing]:
    """Traffic that crosses the ACL of the NAT gateway's subnet."""
    route = network.default_route(subnet.id)
    nat = network.nats.get(route.target) if route else None
    acl = network.acl_of(nat.subnet) if nat else None
    if nat is None or acl is None or nat.subnet == subnet.id:
        return
    purpose = f"{nat.id}, the NAT gateway of {subnet.id}"
    yield _Crossing(acl, False, _HTTPS, subnet.block, purpose)
    yield _Crossing(acl, True, _ANSWERS, subnet.block, purpose)
    yield _Crossing(acl, True, _HTTPS, WORLD, purpose)
    yield _Crossing(acl, False, _AT_NAT, WORLD, purpose)


def _acl_finding(
    network: Network, by: AclEntry | None, pieces: list[tuple[_Crossing, Blocked]]
) -> Finding:
    acl, outbound = pieces[0][0].acl, pieces[0][0].outbound
    way, _ = _DIRECTIONS[outbound]
    merged = _merged([piece for _, piece in pieces])
    traffic = ", ".join(dict.fromkeys(ports(piece.protocol, *piece.ports) for piece in merged))
    purposes = " and ".join(dict.fromkeys(crossing.purpose for crossing, _ in pieces))
    decision = str(by) if by else "no rule matches, so the default rule denies it"
    return Finding(
        f"acl_{way}",
        "error",
        f"{acl.id} blocks {traffic} {way} ({purposes}). ACLs are stateless: requests and responses "
        "each need a rule",
        (f"{acl.id} {way}, {decision}",),
        _acl_fix(network, acl, by, merged, outbound=outbound),
    )


def _merged(pieces: list[Blocked]) -> list[Blocked]:
    """The pieces, with adjacent port ranges merged."""
    merged: list[Blocked] = []
    ordered = sorted(dict.fromkeys(pieces), key=lambda piece: (*_traffic(piece), piece.ports))
    for _, group in groupby(ordered, key=_traffic):
        first, *rest = group
        merged.append(first)
        for piece in rest:
            low, high = merged[-1].ports
            if piece.ports[0] <= high + 1:
                merged[-1] = replace(merged[-1], ports=(low, max(high, piece.ports[1])))
            else:
                merged.append(piece)
    return merged


def _traffic(piece: Blocked) -> tuple[str, IPv4Network]:
    return piece.protocol, piece.peer


def _acl_fix(
    network: Network,
    acl: NetworkAcl,
    by: AclEntry | None,
    pieces: list[Blocked],
    *,
    outbound: bool,
) -> Fix:
    limit = by.number if by else LAST
    numbers = _free_numbers(acl, limit, len(pieces), outbound=outbound)
    if len(numbers) < len(pieces):
        summary = f"remove rule {limit}: no lower rule number is free"
        return network.fix("acl_delete", summary, acl=acl.id, outbound=outbound, number=limit)
    entries = [
        {
            "number": number,
            "protocol": _PROTOCOL_NUMBERS.get(piece.protocol, piece.protocol),
            "low": piece.ports[0],
            "high": piece.ports[1],
            "block": str(piece.peer),
        }
        for number, piece in zip(numbers, pieces, strict=True)
    ]
    place = f"rule {limit}" if limit < LAST else "the last rule"
    summary = f"add an allow rule before {place}"
    return network.fix("acl_entry", summary, acl=acl.id, outbound=outbound, entries=entries)


def _free_numbers(acl: NetworkAcl, limit: int, count: int, *, outbound: bool) -> list[int]:
    """Free rule numbers below `limit`, in steps of 10 if they fit."""
    taken = {entry.number for entry in acl.entries[outbound]}
    highest = max((number for number in taken if number < limit), default=0)
    spaced = [highest + _NUMBER_STEP * step for step in range(1, count + 1)]
    if spaced[-1] < limit:
        return spaced
    free = [number for number in range(limit - 1, 0, -1) if number not in taken]
    return sorted(free[:count])
