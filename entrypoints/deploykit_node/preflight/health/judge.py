"""What is wrong with the health of nodes, by their own checks and beside the other nodes.

Pure, as `findings` is.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from deploykit_node.preflight.islands import ranges
from deploykit_node.preflight.peers import Peers

_SLOW = {"GPU": 0.8, "disk": 0.2}
_SLOW_USUALLY = 0.5
"""Share of the median below which a speed is named, by the first word of its name.

Processors are shared with other programs, and disks often with other nodes that write as well.
"""
_ENOUGH = {"disk": 100e6, "memory": 2e9}
"""Bytes per second from which on a speed is never named, by the first word of its name."""
_LEAST = 3
"""Nodes of which a median says something."""

Healths = Mapping[int, Mapping[str, Any]]
"""What `Health.record` gives, by node."""
Judged = Iterator[tuple[str, bool]]
"""Sentences, and whether the job must not start."""


def judge(peers: Peers, healths: Healths) -> Judged:
    """Faults of each node, what differs between nodes, and what is slow beside the others."""
    for node, health in sorted(healths.items()):
        for text, fatal in health["faults"]:
            yield f"{peers.label(node)}: {text}", fatal
    yield from _counts(peers, healths)
    yield from slow(peers, {node: health["speeds"] for node, health in healths.items()})


def _counts(peers: Peers, healths: Healths) -> Judged:
    names = sorted({name for health in healths.values() for name in health["counts"]})
    for name in names:
        counts = {node: health["counts"].get(name, 0) for node, health in healths.items()}
        _, usual = max((many, count) for count, many in Counter(counts.values()).items())
        fewer: dict[int, list[int]] = defaultdict(list)
        for node, count in counts.items():
            if count < usual:
                fewer[count].append(node)
        for count, nodes in sorted(fewer.items()):
            who = peers.label(nodes[0])
            who += f" and others ({ranges(nodes)})" if len(nodes) > 1 else ""
            yield f"{who}: {count} {name}, where most nodes have {usual}", name == "GPUs"


def slow(peers: Peers, speeds: Mapping[int, Mapping[str, float]]) -> Judged:
    """Nodes whose speed is far below the median of all nodes, the slowest first."""
    names = sorted({name for of_node in speeds.values() for name in of_node})
    for name in names:
        known = {node: of_node[name] for node, of_node in speeds.items() if name in of_node}
        if len(known) < _LEAST:
            continue
        median = statistics.median(known.values())
        kind = name.partition(" ")[0]
        share, enough = _SLOW.get(kind, _SLOW_USUALLY), _ENOUGH.get(kind, math.inf)
        for node, speed in sorted(known.items(), key=lambda item: item[1]):
            if median > 0 and speed < min(share * median, enough):
                beside = f"{speed / median:.0%} of the median"
                why = "a limit on that machine, another process, or hardware that fails"
                yield f"{peers.label(node)}: {name} reaches {beside} of the nodes: {why}", False
