"""Which nodes and links are slow, by medians, and whether the network or the machine is to blame.

Pure, as `findings` is. A transfer is slow on a slow network, and on a machine that has no processor
for it. Each node also sends to itself, which no network slows down.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from deploykit_node.preflight.islands import Link
from deploykit_node.preflight.messages import Record
from deploykit_node.preflight.peers import Peers

SMALL = 0.05
"""A link or node below this share of the median is broken; if all are slow, the network is."""
_BUSY = 0.1
"""A node that reaches less than this share of the median to itself has no processor for it."""
_LEAST = 3
"""Links of a node from which a median says something."""

Rates = dict[Link, float]
"""Bytes in a second."""


class Slow(NamedTuple):
    """A node, or a link if there is a `source`."""

    node: int
    source: int | None
    rate: float
    median: float
    """The median of what each node reaches on its best link."""
    busy: bool
    """Whether a machine is busy, so that the network cannot be judged."""

    @property
    def broken(self) -> bool:
        """Whether the job must not start."""
        return not self.busy and self.rate < self.median * SMALL


def find(reports: Mapping[int, Record]) -> Iterator[Slow]:
    """Nodes most of whose links are slow, then the other slow links, the slowest first."""
    rates: Rates = {}
    slow = set()
    for source, record in reports.items():
        for name, link in record["links"].items():
            if "rate" in link:
                rates[source, int(name)] = link["rate"]
            if link["state"] == "slow":
                slow.add((source, int(name)))
    if not slow:
        return
    own = {node: record.get("own") for node, record in reports.items()}
    links = _links(rates)
    usual = statistics.median(max(rates[link] for link in of_node) for of_node in links.values())
    mostly = {node for node, of_node in links.items() if _mostly(of_node, slow)}
    medians = {n: m for n in mostly if (m := _median(rates, links[n])) < usual / 2}
    for node, rate in sorted(medians.items(), key=lambda item: item[1]):
        yield Slow(node, None, rate, usual, _busy(own, (node,), rate, usual))
    for source, node in sorted(slow, key=rates.__getitem__):
        if source not in medians and node not in medians:
            rate = rates[source, node]
            yield Slow(node, source, rate, usual, _busy(own, (source, node), rate, usual))


def _links(rates: Rates) -> dict[int, list[Link]]:
    """The links of each node, in both directions."""
    links: dict[int, list[Link]] = defaultdict(list)
    for source, node in rates:
        links[source].append((source, node))
        links[node].append((source, node))
    return links


def _mostly(links: list[Link], slow: set[Link]) -> bool:
    """Whether most links of a node are slow, and they are enough to judge it."""
    return len(links) >= _LEAST and 2 * sum(link in slow for link in links) > len(links)


def _median(rates: Rates, links: list[Link]) -> float:
    return statistics.median(rates[link] for link in links)


def _busy(
    own: Mapping[int, float | None], nodes: tuple[int, ...], rate: float, usual: float
) -> bool:
    """Whether a node is as slow to itself, or nearly, or could not find out."""
    known = [own.get(node) for node in nodes]
    return any(it is None or it < max(usual * _BUSY, rate * 4) for it in known)


def sentence(peers: Peers, slow: Slow) -> str:
    """What is slow, compared with what, and what to check."""
    if slow.source is None:
        what = f"{peers.label(slow.node)} is slow, {_speed(slow.rate)} in the median of its links"
    else:
        pair = f"{peers.label(slow.source)} to {peers.label(slow.node)}"
        what = f"{pair} is slow, {_speed(slow.rate)}"
    text = f"{what}, while nodes reach {_speed(slow.median)} (median of their best links). "
    if slow.busy:
        return text + "The machine is busy: it is slow to itself too, so the network may be well"
    return text + "Check the cable, the speed of the port (ethtool), and limits on that machine"


def _speed(rate: float) -> str:
    return f"{rate / 1e6:.1f} MB/s"
