"""What is wrong, by the nodes' reports: which pair, what, and why probably; and the report's lines.

Pure: all facts come in as arguments, and sentences go out.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from deploykit_node.preflight import speeds
from deploykit_node.preflight.peers import ALL_PAIRS, Finding, Peers, Record, ranges

Reports = Mapping[int, Record]
"""The reports of the nodes that have sent one, by node."""

_MANY = 16
"""Most findings in a report, names or pairs in a sentence, and nodes in a matrix."""
_CLOCK = 2.0
"""Seconds by which a clock may be wrong."""
_LEAST = {"/dev/shm": 16 << 20}  # noqa: S108 - the kernel's own name
_LITTLE = {"/dev/shm": 65 << 20}  # noqa: S108 - as above
_LEAST_ON_DISK, _LITTLE_ON_DISK = 100 << 20, 5 << 30
"""Free bytes below which a job fails at once, and below which it may (Docker's shm: 64 MiB)."""
_SLOW_DEVICE = {"GPU": 0.8, "CPU": 0.5}
"""Share of the median below which a device is named. CPUs are shared with other programs."""
_FEW = 3
"""Nodes of which a median says something."""

_STATES = {
    "dropped": "gets no response from {address}: the packets are dropped",
    "refused": "cannot connect to {address}: nothing is listening there",
    "unreachable": "cannot reach {address}: no route, or no machine responds",
    "closed": "cannot communicate with {address}: the connection is closed immediately",
    "unknown": "cannot resolve the host name",
    "other": "reaches a different node at {address}: two nodes have the same address or name",
}
_DEAD = {
    "dropped": "The node is down, or a firewall or security group drops all packets to it",
    "refused": "The machine is up, but its launcher has not started or has exited. Check its log",
    "unreachable": "The node is down, or on another network",
    "unknown": "Add its name to DNS or to /etc/hosts on every node",
}
_PORTS = (
    "The trainer's connections (NCCL, Gloo) use any port in net.ipv4.ip_local_port_range, 32768 to "
    "60999 by default. Allow all TCP ports between the nodes of the job (on AWS: a security group "
    "that allows traffic from itself), or narrow that range to open ports on every node"
)


def judge_pairs(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """What is wrong between the nodes, and with each node."""
    broken = list(_broken(peers, reports))
    yield from broken or _silent(peers, reports)
    yield from _transfers(peers, reports)
    yield from speeds.judge_links(peers, reports)
    yield from _versions(peers, {node: record["versions"] for node, record in reports.items()})
    yield from _clocks(peers, reports)
    for node, record in sorted(reports.items()):
        yield from _space(peers, node, record)
        for text, fatal in record["health"]["faults"]:
            yield Finding(f"{peers.label(node)}: {text}", fatal, node)
    yield from _counts(peers, {n: record["health"]["counts"] for n, record in reports.items()})


def judge_versions(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """What is wrong with PyTorch on each node, once it is imported."""
    yield from _silent(peers, reports)
    for node, record in sorted(reports.items()):
        if "torch" not in record and record["ended"]:
            output = "; ".join(record["output"])
            text = f"PyTorch cannot be imported on {peers.label(node)}: {output}"
            yield Finding(text, fatal=True)
        elif "torch" not in record:
            text = (
                f"{peers.label(node)} did not finish importing PyTorch in {record['seconds']:.0f} "
                "s; storage may be slow. The process group was not tested"
            )
            yield Finding(text, fatal=False)
        elif not record["correct"]:
            text = f"{peers.label(node)} computes wrong matrix products: faulty GPU, CPU or memory"
            yield Finding(text, fatal=True, node=node)
    ready = {node: record for node, record in reports.items() if "torch" in record}
    names = ("torch", "NCCL", "backend")
    yield from _versions(peers, {n: {name: it[name] for name in names} for n, it in ready.items()})
    yield from _slow_devices(peers, {node: record["speeds"] for node, record in ready.items()})


def judge_group(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """What is wrong with the all_reduce.

    One failed rank makes others fail. Ranks that have exited say more than those that are late.
    """
    yield from _silent(peers, reports)
    bad = {node: record for node, record in reports.items() if not record.get("correct")}
    ended = {node: record for node, record in bad.items() if record.get("ended")}
    for node, record in sorted((ended or bad).items()):
        if "rank" not in record:
            text = (
                f"all_reduce returned a wrong sum on {peers.label(node)}: faulty memory, GPU or NIC"
            )
        else:
            how = "failed" if record["ended"] else f"did not finish in {record['seconds']:.0f} s"
            output = "; ".join(record["output"]) or "no output"
            text = (
                f"every pair passes the TCP test, but the process group {how} on "
                f"{peers.label(node)}, rank {record['rank']}: {output}. "
                "Compare the node's interface with the table above"
            )
        yield Finding(text, fatal=True)


def judge_bandwidth(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """Which nodes are slow in an all_reduce, unless it was not measured in time."""
    measured = {node: record for node, record in reports.items() if "large" in record}
    if len(measured) == len(peers.hosts):
        yield from speeds.judge_group(peers, measured)
    else:
        yield Finding("the all_reduce bandwidth test timed out", fatal=False)


_JUDGES: dict[str, Callable[[Peers, Reports], Iterator[Finding]]] = {
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
    more = Finding(
        f"{len(findings) - _MANY} more finding(s) not shown", fatal=findings[_MANY].fatal
    )
    return [*findings[:_MANY], more]


def blamed(peers: Peers, findings: Iterable[Finding]) -> dict[str, str]:
    """The nodes, by host name, that are at fault alone, each with the first sentence.

    Not a pair of nodes, and not what differs between nodes: another job may well run there. Nor a
    node whose launcher has only not started.
    """
    by_host: dict[str, str] = {}
    for text, fatal, node in findings:
        if fatal and node is not None:
            by_host.setdefault(peers.hosts[node], text)
    return by_host


def without_verdict(peers: Peers, part: str, reports: Reports) -> list[Finding]:
    """The findings of a node that got no verdict from node 0."""
    if part == "bandwidth":
        return []
    fatal = [finding for finding in judge(part, peers, reports) if finding.fatal]
    text = f"node 0 sent {peers.label(peers.node)} no result for the {part}: check node 0's log"
    return fatal or [Finding(text, fatal=True)]


def _broken(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """Nodes that none reaches, nodes that reach none, then pairs that cannot connect."""
    broken, of_node = {}, defaultdict[int, list[tuple[int, int]]](list)
    for source, node, link in _links(reports):
        of_node[node].append((source, node))
        of_node[source].append((source, node))
        if link["state"] in _STATES:
            broken[source, node] = link
    explained = set[tuple[int, int]]()
    for node in range(len(peers.hosts)):
        inward = {pair for pair in of_node[node] if pair[1] == node}
        outward = {pair for pair in of_node[node] if pair[0] == node}
        if inward <= broken.keys() and (len(inward) > 1 or (inward and node not in reports)):
            links = {source: broken[source, node] for source, _ in inward}
            yield _unreachable(peers, node, links, reported=node in reports)
            explained |= inward
        elif outward <= broken.keys() and len(outward) > 1 and not inward <= broken.keys():
            yield _confined(peers, node, min(outward)[1], broken[min(outward)])
            explained |= outward
    pairs = {pair: link for pair, link in broken.items() if pair not in explained}
    for (source, node), link in sorted(pairs.items()):
        back = pairs.get((node, source))
        if back is None or source < node:
            yield Finding(_pair(peers, source, node, link, back), fatal=True)


def _confined(peers: Peers, node: int, other: int, link: Record) -> Finding:
    what = f"{peers.label(node)} cannot connect to any other node, although others can reach it"
    text = f"{what}: node {node} {_how(peers, other, link)}. Check its outbound rules"
    return Finding(text, fatal=True, node=node)


def _unreachable(peers: Peers, node: int, links: Reports, *, reported: bool) -> Finding:
    source, link = min(links.items())
    who = peers.label(source)
    if len(links) > 1:
        others = "other nodes that sent a report"
        others = others if len(peers.hosts) <= ALL_PAIRS else "nodes that tried"
        who = f"each of the {others} ({ranges(links)})"
    what = f"{peers.label(node)} cannot be reached: {who} {_how(peers, node, link)}"
    if reported:
        why = "Its own connections work, so its inbound rules probably block the others"
        return Finding(f"{what}. {why}", fatal=True, node=node)
    why = _DEAD.get(link["state"], _DEAD["dropped"])
    started = link["state"] != "refused"  # the machine may be well
    return Finding(f"{what}. {why}", fatal=True, node=node if started else None)


def _pair(peers: Peers, source: int, node: int, link: Record, back: Record | None) -> str:
    pair = f"{peers.label(source)} to {peers.label(node)}"
    what = f"{pair}: node {source} {_how(peers, node, link)}"
    if link["state"] in {"unknown", "other"}:
        return f"{what}. Make DNS or /etc/hosts the same on all nodes"
    if back is None:
        rules = f"the inbound rules of node {node}, or the outbound rules of node {source}"
        return f"{what}. The other direction works: check {rules}"
    return (
        f"{what}, and node {node} cannot reach node {source} either. Other pairs pass: check "
        "the firewall, NACL or route between these two"
    )


def _how(peers: Peers, node: int, link: Record) -> str:
    host, port = peers.addresses[node] or peers.hosts[node], link.get("port", peers.port)
    return _STATES[link["state"]].format(address=f"{host} port {port}")


def _silent(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """Nodes that sent no report although they were reached; only node 0 gets the reports."""
    for node in range(0 if peers.node else len(peers.hosts)):
        if node not in reports:
            text = (
                f"{peers.label(node)} sent no report in time: it cannot connect to the others, or "
                "its launcher has exited. Check its log"
            )
            yield Finding(text, fatal=True)


def _transfers(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """Pairs that can connect but cannot transfer data as a trainer does."""
    links = list(_links(reports))
    if ports := [(s, n, link) for s, n, link in links if link["state"] == "ports"]:
        source, node, link = ports[0]
        more = f" and {len(ports) - 1} more pairs" if len(ports) > 1 else ""
        pairs = ", ".join(f"{s} to {n}" for s, n, _ in ports[:_MANY])
        text = (
            f"{peers.label(source)} to {peers.label(node)}{more}: port {peers.port} works, but "
            f"port {link['bulk']} is {link['how']} (pairs: {pairs}). {_PORTS}"
        )
        yield Finding(text, fatal=True)
    for source, node, link in links:
        if link["state"] == "stalled":
            sizes = {n: reports[n].get("mtu") for n in (source, node) if n in reports}
            known = ", ".join(f"{size} on node {number}" for number, size in sizes.items())
            text = (
                f"{peers.label(source)} to {peers.label(node)}: small packets arrive, but large "
                f"ones are lost. The MTU ({known}) is probably larger than the network between the "
                "nodes supports. Use the same MTU on all nodes and switches, or a smaller one"
            )
            yield Finding(text, fatal=True)


def _versions(peers: Peers, reports: Mapping[int, Mapping[str, str | None]]) -> Iterator[Finding]:
    """Versions that differ: the job would fail, hang, or train differently by node."""
    for name in next(iter(reports.values()), {}):
        nodes_by_version = defaultdict(list)
        for node, versions in sorted(reports.items()):
            nodes_by_version[versions.get(name)].append(node)
        if len(nodes_by_version) > 1:
            usual = max(nodes_by_version.values(), key=len)
            odd = [peers.label(node) for node in sorted(reports) if node not in usual]
            each = "; ".join(
                f"{version or 'none'} on node{'s' * (len(nodes) > 1)} {ranges(nodes)}"
                for version, nodes in nodes_by_version.items()
            )
            text = f"{name} differs between nodes: {each}. Fix {', '.join(odd[:_MANY])}"
            yield Finding(text, fatal=True)


def _clocks(peers: Peers, reports: Reports) -> Iterator[Finding]:
    """Clocks that are wrong, by node 0's clock."""
    for node in range(1, len(peers.hosts)):
        link, ahead = _clock(reports, node)
        if abs(ahead) > _CLOCK + link.get("seconds", 0.0):
            side = "ahead of" if ahead > 0 else "behind"
            text = (
                f"the clock of {peers.label(node)} is {abs(ahead):.1f} s {side} node 0's: "
                "logs will be out of order, and AWS rejects requests from 5 minutes. Start chrony"
            )
            yield Finding(text, fatal=False)


def _clock(reports: Reports, node: int) -> tuple[Record, float]:
    """The link by which a node's clock is known, and its seconds ahead of node 0's."""
    link = reports.get(0, {"links": {}})["links"].get(str(node), {})
    if "clock" in link:
        return link, link["clock"]
    link = reports.get(node, {"links": {}})["links"].get("0", {})
    return link, -link.get("clock", 0.0)


def _space(peers: Peers, node: int, record: Record) -> Iterator[Finding]:
    """Folders with little free space."""
    spaces = {"/dev/shm": record["shm"], **record["disks"]}  # noqa: S108 - the kernel's own name
    for folder, free in spaces.items():
        if free is not None and free < _LITTLE.get(folder, _LITTLE_ON_DISK):
            text = f"{folder} on {peers.label(node)} has only {human_size(free)} free"
            more = " (in a container: --shm-size or --ipc=host)" if folder in _LITTLE else ""
            yield Finding(text + more, fatal=free < _LEAST.get(folder, _LEAST_ON_DISK))


def _counts(peers: Peers, by_node: Mapping[int, Mapping[str, int]]) -> Iterator[Finding]:
    """Nodes that have fewer of something than most."""
    for name in sorted({name for counts in by_node.values() for name in counts}):
        counts = {node: of_node.get(name, 0) for node, of_node in by_node.items()}
        _, usual = max((many, count) for count, many in Counter(counts.values()).items())
        fewer: dict[int, list[int]] = defaultdict(list)
        for node, count in counts.items():
            if count < usual:
                fewer[count].append(node)
        for count, nodes in sorted(fewer.items()):
            who = peers.label(nodes[0])
            who += f" and others ({ranges(nodes)})" if len(nodes) > 1 else ""
            text = f"{who}: {count} {name}, but most nodes have {usual}"
            yield Finding(text, name == "GPUs", nodes[0] if len(nodes) == 1 else None)


def _slow_devices(peers: Peers, by_node: Mapping[int, Mapping[str, float]]) -> Iterator[Finding]:
    """Nodes one of whose devices computes far slower than the median, the slowest first."""
    for name in sorted({name for of_node in by_node.values() for name in of_node}):
        known = {node: of_node[name] for node, of_node in by_node.items() if name in of_node}
        median = statistics.median(known.values())
        for node, speed in sorted(known.items(), key=lambda item: item[1]):
            if len(known) >= _FEW and speed < _SLOW_DEVICE[name[:3]] * median:
                beside = f"{speed / median:.0%} of the median"
                why = "Check for a limit on that machine, another process or failing hardware"
                text = f"{peers.label(node)}: {name} runs at {beside} of the nodes. {why}"
                yield Finding(text, fatal=False)


def lines(
    peers: Peers,
    reports: Mapping[str, Reports],
    findings: Iterable[Finding],
    seconds: float,
    ignored: int = 0,
) -> list[str]:
    """Lines for the log, on node 0 with the table of nodes and the matrix of pairs.

    `reports` are those of each part; `ignored` counts connections of strangers.
    """
    count = len(peers.hosts)
    rows, text = reports["pairs"], []
    if peers.node == 0:
        text += [_row(peers, node, rows) for node in range(count)]
        text += _matrix(peers, rows) if count > 1 else []
    text += [f"{'FAILED' if f.fatal else 'warning'}: {f.text}" for f in findings]
    group = reports["group"].get(0, {})
    if group.get("correct"):
        took = f"{group['seconds']:.1f} s"
        text.append(f"all_reduce over {group['backend']}, all ranks of {count} nodes: {took}")
    rates = [record.get("line_rate") for record in rows.values()]
    text += speeds.lines(reports.get("bandwidth", {}), rates)
    if ignored:
        text.append(f"ignored {ignored} connections from outside this job")
    result = "stopped" if any(finding.fatal for finding in findings) else "passed"
    return [*text, f"{result}, {count} node{'' if count == 1 else 's'} in {seconds:.1f} s"]


def _row(peers: Peers, node: int, rows: Reports) -> str:
    if node not in rows:
        return f"{peers.label(node)}: no report"
    record = rows[node]
    versions = ", ".join(f"{name} {it or 'none'}" for name, it in record["versions"].items())
    free = [f"{folder} {human_size(space)}" for folder, space in record["disks"].items()]
    shm = "none" if record["shm"] is None else human_size(record["shm"])
    _, ahead = _clock(rows, node)
    network = ""
    if record["interface"]:
        network = f"{record['interface']} {record['address']} mtu {record['mtu']}, "
    skipped = record["health"]["skipped"]
    unchecked = f"; not checked: {', '.join(skipped)}" if skipped else ""
    return (
        f"{peers.label(node)}: {network}{versions}, clock {ahead:+.2f} s, "
        f"free: shm {shm}, {', '.join(free)}{unchecked}"
    )


def _matrix(peers: Peers, rows: Reports) -> list[str]:
    """MB/s from each node (row) to each other one (column), or the state of a bad link.

    With many nodes, only the pairs with a bad link.
    """
    nodes = range(len(peers.hosts))
    if len(nodes) > _MANY:
        bad = [link for link in _links(rows) if link[2]["state"] != "ok"]
        return [f"{source} to {node}: {_cell(link)}" for source, node, link in bad[:_MANY]]
    text = ["from".rjust(12) + "".join(f"{f'to {node}':>12}" for node in nodes) + "  (MB/s)"]
    for node in nodes:
        links = rows[node]["links"] if node in rows else {}
        cells = ["-" if n == node else _cell(links.get(str(n))) for n in nodes]
        text.append(f"{node:>12}" + "".join(f"{cell:>12}" for cell in cells))
    return text


def _cell(link: Record | None) -> str:
    if link is None:
        return "?"
    if link["state"] == "slow":
        return f"slow {link['rate'] / 1e6:.1f}"
    return f"{link['rate'] / 1e6:.0f}" if "rate" in link else str(link["state"])


def _links(reports: Reports) -> Iterator[tuple[int, int, Record]]:
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
