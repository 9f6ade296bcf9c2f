"""The log lines of the preflight test: nodes, pairs, findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deploykit_node.preflight import bandwidth
from deploykit_node.preflight.findings import Finding, Reports, all_links, clock, human_size
from deploykit_node.preflight.messages import Record
from deploykit_node.preflight.peers import Peers

_MANY = 16
"""Nodes above which the matrix would be wider than a screen."""


def lines(
    peers: Peers,
    reports: Mapping[str, Reports],
    findings: Iterable[Finding],
    seconds: float,
    ignored: int = 0,
) -> list[str]:
    """Lines for the log, on node 0 with the table of nodes and the matrix of pairs.

    `reports` are those of each part; `ignored` counts messages that no node has signed.
    """
    count = len(peers.hosts)
    rows, text = reports["pairs"], []
    if peers.node == 0:
        text += [_row(peers, node, rows.get(node), rows[0]) for node in range(count)]
        text += _matrix(peers, rows) if count > 1 else []
    text += [f"{'FAILED' if f.fatal else 'warning'}: {f.text}" for f in findings]
    group = reports["group"].get(0, {})
    if group.get("correct"):
        took = f"{group['seconds']:.1f} s"
        text.append(f"all_reduce over {group['backend']}, all ranks of {count} nodes: {took}")
    rates = [record.get("line_rate") for record in rows.values()]
    text += bandwidth.lines(reports.get("bandwidth", {}), rates)
    if ignored:
        text.append(f"ignored {ignored} messages that no node of this job signed")
    result = "stopped" if any(finding.fatal for finding in findings) else "passed"
    return [*text, f"{result}, {count} node{'' if count == 1 else 's'} in {seconds:.1f} s"]


def _row(peers: Peers, node: int, record: Record | None, first: Record) -> str:
    if record is None:
        return f"{peers.label(node)}: no report"
    versions = ", ".join(f"{name} {it or 'none'}" for name, it in record["versions"].items())
    free = [f"{folder} {human_size(space[0])}" for folder, space in record["disks"].items()]
    shm = human_size(record["shm"][0]) if record["shm"] else "none"
    _, ahead = clock({0: first, node: record}, node)
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

    For many nodes, only the pairs with a bad link.
    """
    nodes = range(len(peers.hosts))
    if len(nodes) > _MANY:
        bad = [link for link in all_links(rows) if link[2]["state"] != "ok"]
        return [f"{source} to {node}: {_cell(link)}" for source, node, link in bad[:_MANY]]
    head = "from".rjust(12) + "".join(f"{f'to {node}':>12}" for node in nodes) + "  (MB/s)"
    return [head, *(f"{node:>12}" + _cells(nodes, rows.get(node), node) for node in nodes)]


def _cells(nodes: Iterable[int], record: Record | None, own: int) -> str:
    links = record["links"] if record else {}
    return "".join(f"{'-' if node == own else _cell(links.get(str(node))):>12}" for node in nodes)


def _cell(link: Record | None) -> str:
    if link is None:
        return "?"
    if link["state"] == "slow":
        return f"slow {link['rate'] / 1e6:.1f}"
    return f"{link['rate'] / 1e6:.0f}" if "rate" in link else str(link["state"])
