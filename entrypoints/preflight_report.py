"""The lines that the test before the trainer leaves in the log: nodes, pairs, findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from preflight_messages import Record
from preflight_pairs import Course
from preflight_words import Finding, Told, all_links, human_size

_MANY = 16
"""Nodes above which the matrix would be wider than a screen."""


def lines(
    course: Course,
    told: Mapping[str, Told],
    findings: Iterable[Finding],
    seconds: float,
    ignored: int = 0,
) -> list[str]:
    """Lines for the log: on node 0 the table of nodes and the matrix of pairs."""
    count = len(course.hosts)
    rows, found = told["pairs"], []
    if course.node == 0:
        found += [_row(course, node, rows.get(node), rows[0]) for node in range(count)]
        found += _matrix(course, rows) if count > 1 else []
    found += [f"{'FAILED' if f.fatal else 'warning'}: {f.text}" for f in findings]
    sums = told["group"].get(0, {})
    if sums.get("right"):
        took = f"{sums['seconds']:.1f} s"
        found.append(f"all_reduce over {sums['backend']}, all ranks of {count} nodes: {took}")
    if ignored:
        found.append(f"ignored {ignored} messages that no node of this job has signed")
    well = "stopped" if any(finding.fatal for finding in findings) else "passed"
    return [*found, f"{well}, {count} node{'' if count == 1 else 's'} in {seconds:.1f} s"]


def _row(course: Course, node: int, record: Record | None, first: Record) -> str:
    if record is None:
        return f"{course.who(node)}: said nothing"
    versions = ", ".join(f"{name} {it or 'none'}" for name, it in record["versions"].items())
    free = [f"{folder} {human_size(space[0])}" for folder, space in record["disks"].items()]
    shm = human_size(record["shm"][0]) if record["shm"] else "none"
    clock = first["links"].get(str(node), {}).get("clock", 0.0)
    way = ""
    if record["interface"]:
        way = f"{record['interface']} {record['address']} mtu {record['mtu']}, "
    return (
        f"{course.who(node)}: {way}{versions}, clock {clock:+.2f} s, "
        f"free: shm {shm}, {', '.join(free)}"
    )


def _matrix(course: Course, rows: Told) -> list[str]:
    """MB/s from each node (row) to each other one (column), or what was in the way.

    Of many nodes, only the pairs that have something in the way.
    """
    nodes = range(len(course.hosts))
    if len(nodes) > _MANY:
        ill = [link for link in all_links(rows) if link[2]["state"] != "ok"]
        return [f"{source} to {node}: {_cell(link)}" for source, node, link in ill[:_MANY]]
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
