"""The nodes of a preflight test, as one of them sees them before the test begins."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deploykit_node.cluster import BadEnvironment, Cluster
from deploykit_node.network import addresses, interfaces
from deploykit_node.network.rendezvous import Rendezvous

PORTS = 3
"""Ports that a node may listen on, in case another program has one of them."""
ALL_PAIRS = 32
"""Most nodes of which every pair is tested. With more nodes, each tests some others."""

Record = dict[str, Any]
"""A JSON object."""


class Finding(NamedTuple):
    """A sentence, whether it stops the job, and the node that is at fault, if it is one alone."""

    text: str
    fatal: bool
    node: int | None = None


@dataclass(frozen=True)
class Peers:
    """The nodes of one test. `node` is the one that this process tests for."""

    node: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    """One per node; empty if the host name does not resolve here."""
    port: int
    """The rendezvous port. Each node listens there, on its own address, during the test."""
    key: bytes = field(repr=False)
    """A secret of the nodes of this attempt."""
    held: socket.socket | None = None
    """The bound socket of `port`, if this node has it already."""

    @property
    def tested(self) -> list[int]:
        """The nodes to which this one tests its link, beginning with its neighbor.

        With more than `ALL_PAIRS` nodes those 1, 2, 4, ... numbers before and after it, in this
        order, so that in each round each node sends to one and receives from one; node 0 is last.
        """
        count = len(self.hosts)
        if count <= ALL_PAIRS:
            return [(self.node + step) % count for step in range(1, count)]
        steps = [sign << bit for bit in range((count // 2).bit_length()) for sign in (1, -1)]
        nodes = dict.fromkeys((self.node + step) % count for step in steps)
        nodes.setdefault(0)
        nodes.pop(self.node, None)
        return list(nodes)

    @property
    def only_greeted(self) -> int | None:
        """Node 0, where this node tests it only because all report to it."""
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


def of_cluster(here: Cluster, meeting: Rendezvous) -> Peers:
    """The nodes of `here`, which meet at `meeting`; their key holds for this attempt only."""
    known = _addresses(here)
    known[0] = meeting.host or known[0]
    key = hmac.digest(meeting.key, meeting.name.encode(), "sha256")
    return Peers(here.node, here.hosts, tuple(known), meeting.port, key, meeting.held)


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


def ranges(nodes: Iterable[int]) -> str:
    """``3, 5, 6, 120 to 159``."""
    runs: list[list[int]] = []
    for node in sorted(nodes):
        if runs and node == runs[-1][-1] + 1:
            runs[-1][1:] = [node]
        else:
            runs.append([node])
    texts = [(", " if run[-1] - run[0] == 1 else " to ").join(map(str, run)) for run in runs]
    return ", ".join(texts)
