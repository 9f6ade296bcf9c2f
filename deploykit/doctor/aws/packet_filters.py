"""Which packets the rules of security groups and network ACLs allow."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from deploykit.doctor.aws.inventory import (
    AclEntry,
    Network,
    NetworkAcl,
    SecurityGroup,
    SecurityGroupRule,
)
from deploykit.doctor.aws.requirements import Flow, Ports

WORLD = Network("0.0.0.0/0")
_PUBLIC = ipaddress.IPv4Address("1.1.1.1")


def rules_of(groups: Iterable[SecurityGroup], *, outbound: bool) -> list[SecurityGroupRule]:
    """The rules of all groups in one direction; traffic passes if any of them allows it."""
    return [rule for group in groups for rule in (group.outbound if outbound else group.inbound)]


def missing(
    flow: Flow, given: Iterable[SecurityGroupRule], members: Collection[str], block: Network
) -> list[Ports]:
    """The ports of `flow` that no rule opens for `block`, whose hosts are in groups `members`."""
    opened = [
        (rule.low, rule.high)
        for rule in given
        if rule.protocol in {"-1", flow.protocol} and reaches(rule.peer, members, block)
    ]
    return [left for wanted in flow.ports for left in _without(wanted, sorted(opened))]


def reaches(peer: str, members: Collection[str], block: Network) -> bool:
    """Whether a rule's peer covers the whole `block` or is one of the groups `members`."""
    if peer in members:
        return True
    return "/" in peer and block.subnet_of(Network(peer))


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


@dataclass(frozen=True)
class Blocked:
    """Packets that an ACL drops: protocol, ports, peer, and the deciding rule (None: default)."""

    protocol: str
    ports: Ports
    peer: Network
    by: AclEntry | None


def blocked(flow: Flow, peer: Network, entries: Sequence[AclEntry]) -> list[Blocked]:
    """The part of `flow`, from or to `peer`, that an ACL denies by its first matching entry.

    The entries split ports and addresses into ranges; one port and one address of each range are
    tried. If `peer` is the whole internet, only public addresses count.
    """
    last_ports: dict[tuple[int, AclEntry | None], int] = {}
    for low, high in flow.ports:
        for first, last in _port_ranges(low, high, [(e.low, e.high) for e in entries]):
            for address in _addresses(peer, entries):
                by = _deciding_entry(entries, flow.protocol, first, address)
                if by is None or not by.allow:
                    last_ports.setdefault((first, by), last)
    return [
        Blocked(flow.protocol, (first, last), peer, by) for (first, by), last in last_ports.items()
    ]


def _deciding_entry(
    entries: Sequence[AclEntry], protocol: str, port: int, address: ipaddress.IPv4Address
) -> AclEntry | None:
    matching = (
        entry
        for entry in entries
        if entry.protocol in {"-1", protocol}
        and entry.low <= port <= entry.high
        and address in entry.block
    )
    return next(matching, None)


def _port_ranges(low: int, high: int, cuts: Iterable[Ports]) -> Iterator[Ports]:
    starts = {low, *(edge for first, last in cuts for edge in (first, last + 1))}
    kept = sorted(start for start in starts if low <= start <= high)
    yield from zip(kept, [*(start - 1 for start in kept[1:]), high], strict=True)


def _addresses(peer: Network, entries: Sequence[AclEntry]) -> Iterator[ipaddress.IPv4Address]:
    blocks = [entry.block for entry in entries]
    edges = {int(block[0]) for block in blocks} | {int(block[-1]) + 1 for block in blocks}
    first, last = int(peer[0]), int(peer[-1])
    tried = [first, *(edge for edge in sorted(edges) if first < edge <= last)]
    addresses = [ipaddress.IPv4Address(edge) for edge in tried]
    if peer == WORLD:
        yield _PUBLIC
        addresses = [address for address in addresses if address.is_global]
    yield from addresses


def of_subnet(acls: Iterable[NetworkAcl], subnet: str) -> NetworkAcl | None:
    """The ACL that is associated with a subnet; None if it is unknown."""
    return next((acl for acl in acls if subnet in acl.subnets), None)
