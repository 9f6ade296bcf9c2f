"""The bandwidth of all_reduce over the group: which nodes measure together, and which are slow.

Pure but for `waited`. Bus bandwidth is bytes per second times 2 (n - 1) / n, which does not depend
on the number of ranks: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from deploykit_node.preflight.peers import Peers

_ROUNDS = 5
"""Most other nodes with which each node measures."""
_SLOW = 0.8
"""Share of the median below which a node or a pair is named."""
_BUSY = 0.1
"""Share of the time that a rank waited for a processor, from which on it is not judged."""
_LEAST = 3
"""Nodes of which a median says something."""

Measured = Mapping[int, Mapping[str, Any]]
"""What the first rank of each node has measured, by node."""


def bus(size: int, seconds: float, ranks: int) -> float:
    """Bus bandwidth in bytes per second of an all_reduce of `size` bytes."""
    return size / seconds * 2 * (ranks - 1) / ranks


def rounds(node: int, count: int) -> list[int | None]:
    """The node with which `node` measures in each round, as in a round-robin tournament.

    In each round every node has one other; None where it has none, as one of an odd number.
    """
    turns = count - 1 + count % 2
    return [_other(node, count, turns, turn) for turn in range(min(turns, _ROUNDS))]


def _other(node: int, count: int, turns: int, turn: int) -> int | None:
    """By the circle method: two whose numbers add up to the turn; who is left has the last one."""
    if node == turns:
        half = turn if turn % 2 == 0 else turn + turns
        return half // 2
    other = (turn - node) % turns
    other = turns if other == node else other
    return other if other < count else None


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


def judge(peers: Peers, measured: Measured) -> Iterator[tuple[str, bool]]:
    """Nodes, and pairs of nodes, below the median: sentences, none of which stops the job."""
    pairs = _pairs(measured)
    rates: dict[int, list[float]] = defaultdict(list)
    for pair, rate in pairs.items():
        for node in pair:
            rates[node].append(rate)
    if len(rates) < _LEAST:
        return
    usual = statistics.median(max(of_node) for of_node in rates.values())
    slow = {n for n, of_node in rates.items() if max(of_node) < _SLOW * usual}
    for node in sorted(slow, key=lambda node: max(rates[node])):
        yield _sentence(peers.label(node), max(rates[node]), usual), False
    for (first, second), rate in sorted(pairs.items(), key=lambda item: item[1]):
        if rate < _SLOW * usual and not slow & {first, second}:
            who = f"{peers.label(first)} with {peers.label(second)}"
            yield _sentence(who, rate, usual), False


def _pairs(measured: Measured) -> dict[tuple[int, int], float]:
    """The rate of each pair that both measured; the nodes that had no processor are left out."""
    fit = {node: record["pairs"] for node, record in measured.items() if record["busy"] < _BUSY}
    return {
        (node, int(other)): max(rate, fit[int(other)][str(node)])
        for node, others in fit.items()
        for other, rate in others.items()
        if node < int(other) and str(node) in fit.get(int(other), {})
    }


def _sentence(who: str, rate: float, usual: float) -> str:
    what = f"{who}: all_reduce reaches {speed(rate)} of bus bandwidth, {rate / usual:.0%} of the"
    return f"{what} median of the nodes: check its NIC, the cable and what else uses the network"


def lines(measured: Measured, rates: Collection[float | None]) -> Iterator[str]:
    """The line for the report, where the group has more than one rank.

    `rates` are those of the nodes' network devices. One that is not known is None.
    """
    known = [record for record in measured.values() if record.get("large")]
    if known:
        small, large = (statistics.median(it[name] for it in known) for name in ("small", "large"))
        size = known[0]["size"] / 2**20
        busy = sum(record["busy"] >= _BUSY for record in known)
        more = f"; {busy} nodes had no processor for it and are not compared" if busy else ""
        yield (
            f"bus bandwidth: {speed(large)} with {size:.0f} MiB, {speed(small)} with 8 KiB"
            f"{_beside(large, rates)}{more}"
        )


def _beside(large: float, rates: Collection[float | None]) -> str:
    """What the network of the nodes can carry: bus bandwidth cannot be more than that of a node."""
    known = [rate for rate in rates if rate]
    if len(rates) < 2 or not known:  # noqa: PLR2004 - one node uses no network
        return ""
    least = min(known)
    return f"; the network devices of a node carry {speed(least)} ({large / least:.0%} of it)"


def speed(rate: float) -> str:
    """``1.25 GB/s``."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.1f} MB/s"  # noqa: PLR2004
