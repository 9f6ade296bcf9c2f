"""Groups of nodes that are cut off from the rest, as a rack is, or a node in one direction.

Pure, as `findings` is. With many nodes each tests only some others, so that a fault of a rack shows
as many broken links, none of which says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

Link = tuple[int, int]
"""Source and destination."""


class Island(NamedTuple):
    """Nodes that connect to each other; whether they reach the rest, and the rest reaches them."""

    nodes: tuple[int, ...]
    reaches: bool
    reached: bool


def find(tested: Collection[Link], broken: Collection[Link]) -> list[Island]:
    """The islands beside the largest group of nodes that connect to each other both ways."""
    groups = sorted(_groups(tested, broken), key=len)
    return list(_cut_off(groups[:-1], tested, broken))


def _cut_off(
    groups: Iterable[set[int]], tested: Collection[Link], broken: Collection[Link]
) -> Iterator[Island]:
    """The groups of which no link passes in one direction or in both."""
    for group in groups:
        out = [link for link in tested if link[0] in group and link[1] not in group]
        inward = [link for link in tested if link[1] in group and link[0] not in group]
        reaches, reached = (any(x not in broken for x in links) for links in (out, inward))
        if not reaches or not reached:
            yield Island(tuple(sorted(group)), reaches, reached)


def _groups(tested: Collection[Link], broken: Collection[Link]) -> list[set[int]]:
    """The nodes by who connects to whom both ways, directly or through others.

    One way is enough to a node that has reported nothing.
    """
    next_to: dict[int, list[int]] = defaultdict(list)
    passing = set(tested).difference(broken)
    reporting = {source for source, _ in tested}
    for source, node in tested:
        back = (node, source) in passing or node not in reporting
        passes = (source, node) in passing and back
        next_to[source] += [node] if passes else []
        next_to[node] += [source] if passes else []
    groups, seen = [], set[int]()
    for first in sorted(next_to):
        if first in seen:
            continue
        group, waiting = {first}, [first]
        while waiting:
            new = set(next_to[waiting.pop()]) - group
            group |= new
            waiting += new
        seen |= group
        groups.append(group)
    return groups


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
