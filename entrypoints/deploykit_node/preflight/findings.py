"""What is wrong, by the nodes' reports: which pair, what, and why probably.

Pure: all facts come in as arguments, and sentences go out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import starmap
from typing import NamedTuple

from deploykit_node.preflight import bandwidth, islands, speed
from deploykit_node.preflight.health.judge import judge as judge_health
from deploykit_node.preflight.health.judge import slow as slow_nodes
from deploykit_node.preflight.messages import Record
from deploykit_node.preflight.peers import ALL_PAIRS, Peers

Reports = Mapping[int, Record]
"""The reports of the nodes that have sent one, by node."""

_MANY = 16
"""Most findings in a report, and most names or pairs in a sentence."""
_CLOCK = 2.0
"""Seconds by which a clock may be wrong."""
_LEAST = {"shm": 16 << 20, "disk": 100 << 20}
_LITTLE = {"shm": 65 << 20, "disk": 5 << 30}
"""Free bytes below which a job fails at once, and below which it may (Docker's shm: 64 MiB)."""

_NAMES = ("torch", "NCCL", "backend")
"""What must be the same on all nodes once PyTorch is imported."""

_STATES = {
    "dropped": "gets no answer from {address}: the packets are dropped",
    "refused": "is refused by {address}: nothing listens there",
    "unreachable": "cannot reach {address}: no route, or no machine that answers",
    "closed": "cannot talk to {address}: the connection is closed at once",
    "unknown": "cannot resolve the host name",
    "other": "finds another node at {address}: two nodes have the same address or name",
}
_DEAD = {
    "dropped": "It is down, or a firewall or security group drops everything on the way to it",
    "refused": "The machine is up, but its launcher has not started or has exited: see its log",
    "unreachable": "It is down, or in another network",
    "unknown": "Add its name to DNS or to /etc/hosts of every node",
}
_PORTS = (
    "The trainer's connections (NCCL, Gloo) use any port of net.ipv4.ip_local_port_range, 32768 to "
    "60999 by default. Let the nodes of the job reach each other on all TCP ports (on AWS: a "
    "security group that allows itself), or narrow that range on every node to ports that are open"
)


_ABOUT_ONE = re.compile(
    r"node ([0-9]+) \([^)]*\)"
    r"(?::| is slow| cannot be reached| cannot connect| multiplies| and the other nodes)"
)
"""The beginning of a sentence about one node."""


class Finding(NamedTuple):
    """A sentence, and whether the job must not start."""

    text: str
    fatal: bool


def judge_pairs(peers: Peers, reports: Reports) -> list[Finding]:
    """What is wrong between the nodes, and with each node."""
    broken = list(_broken(peers, reports))
    return [
        *broken,
        *([] if broken else _silent(peers, reports)),
        *_transfers(peers, reports),
        *_versions(peers, {node: record["versions"] for node, record in reports.items()}),
        *_clocks(peers, reports),
        *_space(peers, reports),
        *starmap(Finding, judge_health(peers, {n: it["health"] for n, it in reports.items()})),
    ]


def judge_versions(peers: Peers, reports: Reports) -> list[Finding]:
    """What is wrong with PyTorch on each node, once it is imported."""
    findings = list(_silent(peers, reports))
    for node, record in sorted(reports.items()):
        if "torch" in record:
            continue
        if record["ended"]:
            output = "; ".join(record["output"])
            text = f"PyTorch cannot be imported on {peers.label(node)}: {output}"
            findings.append(Finding(text, fatal=True))
        else:
            took = f"in {record['seconds']:.0f} s; slow storage? The process group was not tested"
            text = f"{peers.label(node)} did not import PyTorch {took}"
            findings.append(Finding(text, fatal=False))
    ready = {node: record for node, record in reports.items() if "torch" in record}
    for node, record in ready.items():
        if not record["correct"]:
            text = (
                f"{peers.label(node)} multiplies matrices wrongly: a bad GPU, processor or memory"
            )
            findings.append(Finding(text, fatal=True))
    findings += _versions(
        peers, {n: {name: it[name] for name in _NAMES} for n, it in ready.items()}
    )
    speeds = {node: record["speeds"] for node, record in ready.items()}
    return [*findings, *starmap(Finding, slow_nodes(peers, speeds))]


def judge_group(peers: Peers, reports: Reports) -> list[Finding]:
    """What is wrong with the all_reduce.

    One failed rank makes others fail. Ranks that have exited say more than those that are late.
    """
    findings = list(_silent(peers, reports))
    bad = {node: record for node, record in reports.items() if not record.get("correct")}
    ended = {node: record for node, record in bad.items() if record.get("ended")}
    for node, record in sorted((ended or bad).items()):
        if "rank" not in record:
            text = f"all_reduce gave a wrong sum on {peers.label(node)}: bad memory, GPU or NIC"
        else:
            how = "failed" if record["ended"] else f"did not finish in {record['seconds']:.0f} s"
            output = "; ".join(record["output"]) or "it printed nothing"
            text = (
                f"every pair passes the TCP test, but the process group {how} on "
                f"{peers.label(node)}, rank {record['rank']}: {output}. "
                "Compare its interface with the table"
            )
        findings.append(Finding(text, fatal=True))
    return findings


def judge_bandwidth(peers: Peers, reports: Reports) -> list[Finding]:
    """Which nodes are slow in an all_reduce, unless it was not measured in time."""
    measured = {node: record for node, record in reports.items() if "large" in record}
    if len(measured) == len(peers.hosts):
        return list(starmap(Finding, bandwidth.judge(peers, measured)))
    return [Finding("the bandwidth of all_reduce was not measured in time", fatal=False)]


_JUDGES: dict[str, Callable[[Peers, Reports], list[Finding]]] = {
    "pairs": judge_pairs,
    "versions": judge_versions,
    "group": judge_group,
    "bandwidth": judge_bandwidth,
}


def judge(part: str, peers: Peers, reports: Reports) -> list[Finding]:
    """The findings of one part of the test, the fatal ones first, limited to a readable number."""
    judged = _JUDGES.get(part, judge_group)(peers, reports)  # a trial is of the group too
    findings = sorted(judged, key=lambda finding: not finding.fatal)
    if len(findings) <= _MANY:
        return findings
    more = Finding(f"and {len(findings) - _MANY} more", fatal=findings[_MANY].fatal)
    return [*findings[:_MANY], more]


def blamed(peers: Peers, texts: Iterable[str]) -> dict[str, str]:
    """The nodes, by host name, that fatal findings are about alone, each with the sentence.

    Not a pair of nodes, and not what differs between nodes: another job may well run there. Nor a
    node whose launcher has only not started.
    """
    by_host: dict[str, str] = {}
    for text in texts:
        match = _ABOUT_ONE.match(text)
        if match and _DEAD["refused"] not in text:
            by_host.setdefault(peers.hosts[int(match[1])], text)
    return by_host


def without_verdict(peers: Peers, part: str, reports: Reports) -> list[Finding]:
    """The findings of a node that got no verdict from node 0."""
    if part == "bandwidth":
        return []
    fatal = [finding for finding in judge(part, peers, reports) if finding.fatal]
    text = f"node 0 sent {peers.label(peers.node)} no result of the {part}: see its log"
    return fatal or [Finding(text, fatal=True)]


def _broken(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """Nodes that no other node reaches, then pairs that cannot connect."""
    broken = {
        (source, int(node)): link
        for source, record in reports.items()
        for node, link in record["links"].items()
        if link["state"] in _STATES
    }
    tested = [(source, node) for source, node, _ in all_links(reports)]
    sources_of = defaultdict(list)
    for source, node in tested:
        sources_of[node].append(source)
    for node in range(len(peers.hosts)):
        sources = sources_of[node]
        if not sources or any((source, node) not in broken for source in sources):
            continue
        if node in reports and len(sources) == 1:
            continue  # a single pair, below
        links = {source: broken.pop((source, node)) for source in sources}
        yield Finding(_unreachable(peers, node, links, reported=node in reports), fatal=True)
    if len(peers.hosts) > ALL_PAIRS:
        for island in islands.find(tested, broken) if broken else ():
            out = [it for it in tested if (it[0] in island.nodes) != (it[1] in island.nodes)]
            first, node = next(it for it in out if it in broken)
            example = f"node {first} {_how(peers, node, broken[first, node])}"
            yield Finding(f"{_cut_off(peers, island)}. {example}", fatal=True)
            for link in out:
                broken.pop(link, None)
    for (source, node), link in sorted(broken.items()):
        back = broken.get((node, source))
        if back is None or source < node:
            yield Finding(_pair(peers, source, node, link, back), fatal=True)


def _cut_off(peers: Peers, island: islands.Island) -> str:
    first = peers.label(island.nodes[0])
    who, them = first, "it"
    if len(island.nodes) > 1:
        who, them = f"nodes {islands.ranges(island.nodes)}, from {first} on,", "them"
    if not island.reaches and not island.reached:
        check = f"check what connects {them} to the rest: a switch, a cable, a route"
        return f"{who} and the other nodes do not reach each other: {check}"
    if not island.reaches:
        how = f"cannot connect to any other node that was tried, while others reach {them}"
        return f"{who} {how}: check the outbound rules"
    how = f"cannot be reached by any other node that tried, while connections from {them} work"
    return f"{who} {how}: check the inbound rules"


def _unreachable(peers: Peers, node: int, links: Reports, *, reported: bool) -> str:
    source, link = min(links.items())
    who = peers.label(source)
    if len(links) > 1:
        others = "other nodes that sent a report"
        others = others if len(peers.hosts) <= ALL_PAIRS else "nodes that tried it"
        who = f"each of the {others} ({islands.ranges(links)})"
    what = f"{peers.label(node)} cannot be reached: {who} {_how(peers, node, link)}"
    if reported:
        return f"{what}. Its own connections work, so its inbound rules block the others"
    return f"{what}. {_DEAD.get(link['state'], _DEAD['dropped'])}"


def _pair(peers: Peers, source: int, node: int, link: Record, back: Record | None) -> str:
    pair = f"{peers.label(source)} to {peers.label(node)}"
    what = f"{pair}: node {source} {_how(peers, node, link)}"
    if link["state"] in {"unknown", "other"}:
        return f"{what}. Make DNS or /etc/hosts the same on all nodes"
    if back is None:
        rules = f"the inbound rules of node {node}, or the outbound rules of node {source}"
        return f"{what}. The other direction works: check {rules}"
    return (
        f"{what}, and node {node} does not reach node {source} either. Other pairs pass: check "
        "the firewall, NACL or route between these two"
    )


def _how(peers: Peers, node: int, link: Record) -> str:
    host, port = peers.addresses[node] or peers.hosts[node], link.get("port", peers.port)
    return _STATES[link["state"]].format(address=f"{host} port {port}")


def _silent(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """Nodes that sent no report although they were reached; only node 0 gets the reports."""
    if peers.node:
        return
    for node in range(len(peers.hosts)):
        if node not in reports:
            text = (
                f"{peers.label(node)} sent no report in time: its own connections to the others "
                "fail, or its launcher has exited: see its log"
            )
            yield Finding(text, fatal=True)


def _transfers(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """Pairs that can connect but cannot transfer data as a trainer does."""
    links = list(all_links(reports))
    ports = [(s, n, link) for s, n, link in links if link["state"] == "ports"]
    if ports:
        yield Finding(_closed_ports(peers, ports), fatal=True)
    for source, node, link in links:
        if link["state"] == "stalled":
            yield Finding(_stalled(peers, reports, source, node), fatal=True)
    for slow in speed.find(reports):
        yield Finding(speed.sentence(peers, slow), slow.broken)
    untested = defaultdict(list)
    for source, node, link in links:
        if link["state"] == "files":
            untested[source].append(node)
    for source, nodes in untested.items():
        yield Finding(_no_files(peers, source, nodes), fatal=False)


def _no_files(peers: Peers, source: int, nodes: list[int]) -> str:
    return (
        f"{peers.label(source)} has too many files open (EMFILE), so its links to "
        f"{len(nodes)} nodes were not tested. Raise its limit: ulimit -n, LimitNOFILE of slurmd"
    )


def _closed_ports(peers: Peers, ports: list[tuple[int, int, Record]]) -> str:
    source, node, link = ports[0]
    more = f" and {len(ports) - 1} more pairs" if len(ports) > 1 else ""
    pairs = ", ".join(f"{s} to {n}" for s, n, _ in ports[:_MANY])
    return (
        f"{peers.label(source)} to {peers.label(node)}{more}: port {peers.port} passes, and "
        f"port {link['bulk']} is {link['how']} (pairs: {pairs}). {_PORTS}"
    )


def _stalled(peers: Peers, reports: Reports, source: int, node: int) -> str:
    sizes = {number: reports[number].get("mtu") for number in (source, node) if number in reports}
    known = ", ".join(f"{size} on node {number}" for number, size in sizes.items())
    return (
        f"{peers.label(source)} to {peers.label(node)}: small packets pass and large ones are "
        f"lost. Probably the MTU ({known}) is larger than the network between them supports. "
        "Make it the same on all nodes and switches, or smaller"
    )


def _versions(peers: Peers, reports: Mapping[int, Mapping[str, str | None]]) -> Iterator[Finding]:
    """Versions that differ: the job would fail, hang, or train differently by node."""
    names = next(iter(reports.values()), {})
    for name in names:
        nodes_by_version = defaultdict(list)
        for node, versions in sorted(reports.items()):
            nodes_by_version[versions.get(name)].append(node)
        if len(nodes_by_version) > 1:
            usual = max(nodes_by_version.values(), key=len)
            odd = [peers.label(node) for node in sorted(reports) if node not in usual]
            each = "; ".join(
                f"{version or 'none'} on node {islands.ranges(nodes)}"
                for version, nodes in nodes_by_version.items()
            )
            text = f"{name} is not the same on all nodes: {each}. Correct {', '.join(odd[:_MANY])}"
            yield Finding(text, fatal=True)


def _clocks(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """Clocks that are wrong, by node 0's clock."""
    for node in range(1, len(peers.hosts)):
        link, ahead = clock(reports, node)
        if abs(ahead) > _CLOCK + link.get("seconds", 0.0):
            side = "ahead of" if ahead > 0 else "behind"
            text = (
                f"the clock of {peers.label(node)} is {abs(ahead):.1f} s {side} node 0's: "
                "logs will be out of order; from 5 minutes on AWS refuses requests. Start chrony"
            )
            yield Finding(text, fatal=False)


def clock(reports: Reports, node: int) -> tuple[Record, float]:
    """The link by which a node's clock is known, and its seconds ahead of node 0's."""
    link = reports.get(0, {"links": {}})["links"].get(str(node), {})
    if "clock" in link:
        return link, link["clock"]
    link = reports.get(node, {"links": {}})["links"].get("0", {})
    return link, -link.get("clock", 0.0)


def _space(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """Folders with little free space."""
    for node, record in sorted(reports.items()):
        spaces = [("shm", "/dev/shm", record["shm"])]  # noqa: S108 - the kernel's own name
        spaces += [("disk", folder, space) for folder, space in record["disks"].items()]
        for kind, folder, space in spaces:
            if space and space[0] < _LITTLE[kind]:
                text = f"{folder} of {peers.label(node)} has only {human_size(space[0])} free"
                more = " (a container: --shm-size, --ipc=host)" if kind == "shm" else ""
                yield Finding(text + more, fatal=space[0] < _LEAST[kind])


def all_links(reports: Reports) -> Iterator[tuple[int, int, Record]]:
    """Source, destination and state of each reported link."""
    for source, record in sorted(reports.items()):
        for node, link in sorted(record["links"].items(), key=lambda item: int(item[0])):
            yield source, int(node), link


def human_size(count: float) -> str:
    """``8 GiB`` for a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:  # noqa: PLR2004 - binary units
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
