"""The nodes of a preflight test, as one of them sees them before the test begins."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

from deploykit_node.cluster import BadEnvironment, Cluster
from deploykit_node.network import addresses, interfaces
from deploykit_node.network.rendezvous import Rendezvous
from deploykit_node.preflight.messages import Record, Seal, nonce

PORTS = 3
"""Ports that a node may listen on, in case another program has one of them."""
ALL_PAIRS = 32
"""Most nodes of which every pair is tested. Of more, each node tests some others."""


@dataclass(frozen=True)
class Peers:
    """The nodes of one test. `node` is the one that this process tests for."""

    name: str
    """The run and its attempt."""
    node: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    """One per node; empty if the host name does not resolve here."""
    port: int
    """The rendezvous port. Each node listens there, on its own address, during the test."""
    seal: Seal
    held: socket.socket | None = None
    """The bound socket of `port`, if this node has it already."""

    @property
    def others(self) -> list[int]:
        """The other nodes, each node's neighbor first, so that not all start with the same one."""
        count = len(self.hosts)
        return [(self.node + step) % count for step in range(1, count)]

    @property
    def tested(self) -> list[int]:
        """The nodes to which this one tests its link: all of few.

        Of many, those 1, 2, 4, ... numbers before and after it, in this order, so that in each
        round each node sends to one and receives from one; and the first node last.
        """
        count = len(self.hosts)
        if count <= ALL_PAIRS:
            return self.others
        steps = [sign << bit for bit in range((count // 2).bit_length()) for sign in (1, -1)]
        nodes = dict.fromkeys((self.node + step) % count for step in steps)
        nodes.setdefault(0)
        nodes.pop(self.node, None)
        return list(nodes)

    @property
    def only_greeted(self) -> int | None:
        """The first node, where this one tests it only because all report to it."""
        count = len(self.hosts)
        distance = min(self.node, count - self.node)
        return 0 if count > ALL_PAIRS and distance & (distance - 1) else None

    def label(self, node: int) -> str:
        """``node 2 (host, address)``."""
        host, address = self.hosts[node], self.addresses[node]
        where = host if host == address or not address else f"{host}, {address}"
        return f"node {node} ({where})"

    def ports(self, node: int) -> range:
        """The ports where `node` may listen, above those of other nodes on its machine."""
        first = self.port + self.addresses[:node].count(self.addresses[node])
        return range(first, first + PORTS)

    def request(self, kind: str, **more: Any) -> Record:
        """A request of this node: ``hello``, ``report`` or ``send``."""
        return {"run": self.name, "kind": kind, "node": self.node, "nonce": nonce(), **more}

    def listening_address(self) -> str:
        """All addresses of this node, as others may know it by any and every message is signed.

        If all nodes are one machine, this node's own loopback address.
        """
        own = self.addresses[self.node]
        if len(self.hosts) == 1:
            return "127.0.0.1"
        if not own:
            return "0.0.0.0"  # noqa: S104 - the other nodes connect from anywhere
        if self._on_one_machine():
            return own
        version = ipaddress.ip_address(own).version
        return "::" if version == 6 else "0.0.0.0"  # noqa: PLR2004, S104 - IPv6; as above

    def _on_one_machine(self) -> bool:
        return all(addresses.is_loopback(address) for address in self.addresses if address)


def of_cluster(here: Cluster, meeting: Rendezvous) -> Peers:
    """The nodes of `here`, which meet at `meeting`."""
    known = _addresses(here)
    known[0] = meeting.host or known[0]
    seal = Seal(meeting.key)
    return Peers(
        meeting.name, here.node, here.hosts, tuple(known), meeting.port, seal, meeting.held
    )


def _addresses(here: Cluster) -> list[str]:
    """An address for each node; a loopback address for each if all are this machine."""
    if here.launcher in {"emulated", "alone"}:
        return [f"127.0.{number // 254}.{number % 254 + 1}" for number in range(len(here.hosts))]
    return [_address(host) for host in here.hosts]


def _address(host: str) -> str:
    try:
        route = interfaces.route_to_any(addresses.addresses(host))
        return route.peer if route else addresses.address(host)
    except BadEnvironment:
        return ""
