"""Which nodes and links are slow: by the transfers between the nodes, and by all_reduce.

Bus bandwidth is bytes per second times 2 (n - 1) / n, which does not depend on the number of ranks:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from deploykit_node.preflight.peers import Finding, Peers, Record

SLOW = 12.5e6
"""Bytes per second (100 Mbit/s) below which a transfer is repeated before it is believed."""
_SLOW_LINK, _BROKEN_LINK = 0.5, 0.05
"""Shares of the median below which a slow link is named, and stops the job."""
_BUSY_NODE = 0.1
"""A node that reaches less than this share of the median to itself has no processor for it."""
_ROUNDS = 5
"""Most other nodes with which each node measures its all_reduce."""
_SLOW_GROUP = 0.8
"""Share of the median of all_reduce below which a node or a pair is named."""
_BUSY = 0.1
"""Share of the time that a rank waited for a processor, from which on it is not judged."""

Rates = Mapping[tuple[int, int], float]
"""Bytes per second by pair of nodes."""
Records = Mapping[int, Record]
"""By node."""


class _Slow(NamedTuple):
    """A node, or a pair of nodes neither of which is slow itself."""

    nodes: tuple[int, ...]
    rate: float
    """In bytes per second; a node's best one."""
    usual: float
    """The median of the nodes' best rates."""


def _find(rates: Rates, share: float, most: float = math.inf) -> Iterator[_Slow]:
    """Nodes, then pairs, below a share of the median and below `most`, the slowest first."""
    best: dict[int, float] = defaultdict(float)
    for pair, rate in rates.items():
        for node in pair:
            best[node] = max(best[node], rate)
    if not best:
        return
    usual = statistics.median(best.values())
    limit = min(share * usual, most)
    slow = {node for node, rate in best.items() if rate < limit}
    for node in sorted(slow, key=best.__getitem__):
        yield _Slow((node,), best[node], usual)
    for pair in sorted(rates, key=rates.__getitem__):
        if rates[pair] < limit and not slow.intersection(pair):
            yield _Slow(pair, rates[pair], usual)


def judge_links(peers: Peers, reports: Records) -> Iterator[Finding]:
    """Slow nodes and links, and whether the network or the machine is to blame.

    A transfer is slow on a slow network, and on a machine that has no processor for it. Each node
    also sends to itself, which no network slows down.
    """
    rates = {
        (source, int(node)): link["rate"]
        for source, record in reports.items()
        for node, link in record["links"].items()
        if "rate" in link
    }
    for nodes, rate, usual in _find(rates, _SLOW_LINK, SLOW):
        own = [reports.get(node, {}).get("own") for node in nodes]
        busy = any(it is None or it < max(usual * _BUSY_NODE, rate * 4) for it in own)
        who = " to ".join(map(peers.label, nodes))
        best = " on its best link" if len(nodes) == 1 else ""
        why = "Check the cable, the port speed (ethtool) and any limits on that machine"
        if busy:
            why = "The machine is busy: its loopback is slow too, so the network may be fine"
        text = (
            f"{who} is slow: {rate / 1e6:.1f} MB/s{best}, but the median node reaches "
            f"{usual / 1e6:.1f} MB/s on its best link. {why}"
        )
        broken = not busy and rate < usual * _BROKEN_LINK
        yield Finding(text, broken, nodes[0] if len(nodes) == 1 else None)


def bus(size: int, seconds: float, ranks: int) -> float:
    """Bus bandwidth in bytes per second of an all_reduce of `size` bytes."""
    return size / seconds * 2 * (ranks - 1) / ranks


def rounds(node: int, count: int) -> list[int | None]:
    """The node with which `node` measures in each round, as in a round-robin tournament.

    In each round every node has one other; None where it has none, as one of an odd number. By the
    circle method: two whose numbers add up to the round; who is left has the last one.
    """
    turns = count - 1 + count % 2
    others: list[int | None] = []
    for turn in range(min(turns, _ROUNDS)):
        other = (turn - node) % turns
        if node == turns:
            other = (turn if turn % 2 == 0 else turn + turns) // 2
        elif other == node:
            other = turns
        others.append(other if other < count else None)
    return others


def waited() -> float:
    """Seconds that the threads of this process were ready to run and had no processor.

    https://docs.kernel.org/scheduler/sched-stats.html; 0 where the kernel does not count.
    """
    seconds = 0.0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            seconds += int(path.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
    return seconds


def judge_group(peers: Peers, measured: Records) -> Iterator[Finding]:
    """Nodes, and pairs of nodes, whose all_reduce is below the median. None stops the job."""
    fit = {node: record["pairs"] for node, record in measured.items() if record["busy"] < _BUSY}
    rates = {
        (node, int(other)): max(rate, fit[int(other)][str(node)])
        for node, others in fit.items()
        for other, rate in others.items()
        if node < int(other) and str(node) in fit.get(int(other), {})
    }
    for nodes, rate, usual in _find(rates, _SLOW_GROUP):
        who = " with ".join(map(peers.label, nodes))
        what = (
            f"all_reduce reaches a bus bandwidth of {_size(rate)}, {rate / usual:.0%} of the median"
        )
        why = "Check the NIC, the cable and other network traffic"
        yield Finding(f"{who}: {what} of the nodes. {why}", fatal=False)


def lines(measured: Records, rates: Collection[float | None]) -> Iterator[str]:
    """The line for the report, where the group has more than one rank.

    `rates` are those of the nodes' network devices; None is an unknown one. Bus bandwidth cannot be
    more than that of a node.
    """
    groups = [record for record in measured.values() if record.get("large")]
    if not groups:
        return
    small, large = (statistics.median(it[name] for it in groups) for name in ("small", "large"))
    what = f"{_size(large)} for {groups[0]['size'] / 2**20:.0f} MiB, {_size(small)} for 8 KiB"
    known = [rate for rate in rates if rate]
    if len(rates) > 1 and known:  # one node uses no network
        share = f"{large / min(known):.0%}"
        what += f", {share} of the {_size(min(known))} that a node's network devices can carry"
    if busy := sum(record["busy"] >= _BUSY for record in groups):
        what += f"; {busy} nodes had no free CPU and are not compared"
    yield f"bus bandwidth: {what}"


def _size(rate: float) -> str:
    """``1.25 GB/s``."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.1f} MB/s"  # noqa: PLR2004
