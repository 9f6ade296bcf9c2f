"""What the nodes told, as findings: which pair, what is wrong, and why probably.

Pure: everything comes in, and sentences go out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from preflight_messages import Record
from preflight_pairs import Course

Told = Mapping[int, Record]

_MANY = 16
"""Findings of a report, and names and pairs of one sentence, at most."""
_CLOCK = 2.0
_SMALL = 0.05
"""A link below this share of the fastest is ill; where all are slow, the network is slow."""
_LEAST = {"shm": 16 << 20, "disk": 100 << 20}
_LITTLE = {"shm": 65 << 20, "disk": 5 << 30}
"""Free bytes at which a job fails at once, and those (Docker's shm: 64 MiB) at which it may."""

_STATES = {
    "dropped": "gets no answer from {place}: the packets are dropped",
    "refused": "is refused by {place}: nothing listens there",
    "unreachable": "has no way to {place}: no route, or no machine that answers",
    "closed": "is cut off by {place}: the connection is closed at once",
    "unknown": "does not know an address of its host name",
    "other": "finds another node at {place}: two nodes have one address, or one name",
}
_DEAD = {
    "dropped": "It is down, or a firewall or security group drops everything on the way to it",
    "refused": "The machine is up, but its launcher has not started, or has ended: see its log",
    "unreachable": "It is down, or in another network",
    "unknown": "Add its name to DNS or to /etc/hosts of every node",
}
_PORTS = (
    "The trainer's connections (NCCL, Gloo) use any port of net.ipv4.ip_local_port_range, 32768 to "
    "60999 by default. Let the nodes of the job reach each other on all TCP ports (on AWS: a "
    "security group that allows itself), or narrow that range on every node to ports that are open"
)


class Finding(NamedTuple):
    """A sentence, and whether the job must not start."""

    text: str
    fatal: bool


def judge_pairs(course: Course, told: Told) -> list[Finding]:
    """What is wrong between the nodes, and with them."""
    broken = list(_broken(course, told))
    return [
        *broken,
        *([] if broken else _silent(course, told)),
        *_transfers(course, told),
        *_versions(course, {node: record["versions"] for node, record in told.items()}),
        *_clocks(course, told),
        *_space(course, told),
    ]


def judge_versions(course: Course, told: Told) -> list[Finding]:
    """What PyTorch says of itself on each node, once it is there."""
    found = list(_silent(course, told))
    for node, record in sorted(told.items()):
        if "torch" in record:
            continue
        said = "; ".join(record["said"])
        if record["ended"]:
            text = f"PyTorch cannot be imported on {course.who(node)}: {said}"
            found.append(Finding(text, fatal=True))
        else:
            took = f"in {record['seconds']:.0f} s; slow storage? The process group was not tried"
            found.append(Finding(f"{course.who(node)} did not import PyTorch {took}", False))
    alike = {
        node: {name: record[name] for name in ("torch", "NCCL", "backend")}
        for node, record in told.items()
        if "torch" in record
    }
    return [*found, *_versions(course, alike)]


def judge_group(course: Course, told: Told) -> list[Finding]:
    """How the all_reduce went. Where one rank fails, others fail with it: the ended say more."""
    found = list(_silent(course, told))
    bad = {node: record for node, record in told.items() if not record.get("right")}
    ended = {node: record for node, record in bad.items() if record.get("ended")}
    for node, record in sorted((ended or bad).items()):
        if "rank" not in record:
            text = f"all_reduce gave a wrong sum on {course.who(node)}: bad memory, GPU or NIC"
        else:
            how = "failed" if record["ended"] else f"was not done in {record['seconds']:.0f} s"
            said = "; ".join(record["said"]) or "it said nothing"
            text = (
                f"every pair passes TCP, but the process group {how} on {course.who(node)}, "
                f"rank {record['rank']}: {said}. Compare the interface that it uses with the table"
            )
        found.append(Finding(text, fatal=True))
    return found


_JUDGES: dict[str, Callable[[Course, Told], list[Finding]]] = {
    "pairs": judge_pairs,
    "versions": judge_versions,
    "group": judge_group,
}


def judge(part: str, course: Course, told: Told) -> list[Finding]:
    """The findings of one part of the test, the fatal ones first, and not more than can be read."""
    found = sorted(_JUDGES[part](course, told), key=lambda finding: not finding.fatal)
    if len(found) <= _MANY:
        return found
    more = Finding(f"and {len(found) - _MANY} more", fatal=found[_MANY].fatal)
    return [*found[:_MANY], more]


def alone(course: Course, part: str, told: Told) -> list[Finding]:
    """The findings of a node that node 0 did not answer."""
    found = [finding for finding in judge(part, course, told) if finding.fatal]
    text = f"node 0 gave {course.who(course.node)} no verdict on the {part}: see its log"
    return found or [Finding(text, fatal=True)]


def _broken(course: Course, told: Told) -> Iterator[Finding]:
    """Nodes that nobody reaches, then pairs that do not meet."""
    broken = {
        (source, int(node)): link
        for source, record in told.items()
        for node, link in record["links"].items()
        if link["state"] in _STATES
    }
    for node in range(len(course.hosts)):
        sources = [source for source in told if source != node]
        if not sources or any((source, node) not in broken for source in sources):
            continue
        if node in told and len(sources) == 1:
            continue  # one pair, below
        links = {source: broken.pop((source, node)) for source in sources}
        yield Finding(_nobody(course, node, links, spoke=node in told), fatal=True)
    for (source, node), link in sorted(broken.items()):
        back = broken.get((node, source))
        if back is None or source < node:
            yield Finding(_pair(course, source, node, link, back), fatal=True)


def _nobody(course: Course, node: int, links: Told, *, spoke: bool) -> str:
    source, link = min(links.items())
    who = course.who(source)
    if len(links) > 1:
        who = f"each of the other nodes that spoke ({_numbers(links)})"
    what = f"{course.who(node)} cannot be reached: {who} {_how(course, node, link)}"
    if spoke:
        return f"{what}. Its own connections work, so its inbound rules keep the others out"
    return f"{what}. {_DEAD.get(link['state'], _DEAD['dropped'])}"


def _pair(course: Course, source: int, node: int, link: Record, back: Record | None) -> str:
    pair = f"{course.who(source)} to {course.who(node)}"
    what = f"{pair}: node {source} {_how(course, node, link)}"
    if link["state"] in {"unknown", "other"}:
        return f"{what}. Make DNS or /etc/hosts the same on all nodes"
    if back is None:
        rules = f"the inbound rules of node {node}, or the outbound rules of node {source}"
        return f"{what}. The other direction works: look at {rules}"
    return (
        f"{what}, and neither does node {node} reach node {source}. Other pairs pass: look at "
        "the firewall, NACL or route between these two"
    )


def _how(course: Course, node: int, link: Record) -> str:
    place = f"{course.addresses[node] or course.hosts[node]} port {link.get('port', course.port)}"
    return _STATES[link["state"]].format(place=place)


def _silent(course: Course, told: Told) -> Iterator[Finding]:
    """Nodes that were reached and yet told nothing, as far as this node may expect a word."""
    if course.node:
        return
    for node in range(len(course.hosts)):
        if node not in told:
            text = (
                f"{course.who(node)} said nothing in time: its own connections to the others "
                "fail, or its launcher has ended: see its log"
            )
            yield Finding(text, fatal=True)


def _transfers(course: Course, told: Told) -> Iterator[Finding]:
    """Pairs that meet and yet cannot move data as a trainer does."""
    every = list(all_links(told))
    ports = [(s, n, link) for s, n, link in every if link["state"] == "ports"]
    if ports:
        yield Finding(_closed_ports(course, ports), fatal=True)
    for source, node, link in every:
        if link["state"] == "stalled":
            yield Finding(_stalled(course, told, source, node), fatal=True)
    rates = {(s, n): link["rate"] for s, n, link in every if "rate" in link}
    fastest = max(rates.values(), default=0.0)
    slow = [(s, n) for s, n, link in every if link["state"] == "slow"]
    for source, node in sorted(slow, key=rates.__getitem__):
        rate = _speed(rates[source, node])
        text = f"{course.who(source)} to {course.who(node)} is slow, {rate}"
        ill = rates[source, node] < fastest * _SMALL
        more = f"while the fastest pair has {_speed(fastest)}. "
        advice = "Look at the cable, the speed of the port (ethtool), and limits on that machine"
        yield Finding(f"{text}, {more}{advice}", fatal=ill)


def _closed_ports(course: Course, ports: list[tuple[int, int, Record]]) -> str:
    source, node, link = ports[0]
    more = f" and {len(ports) - 1} more pairs" if len(ports) > 1 else ""
    pairs = ", ".join(f"{s} to {n}" for s, n, _ in ports[:_MANY])
    return (
        f"{course.who(source)} to {course.who(node)}{more}: port {course.port} passes, and "
        f"port {link['bulk']} is {link['how']} (pairs: {pairs}). {_PORTS}"
    )


def _stalled(course: Course, told: Told, source: int, node: int) -> str:
    sizes = {number: told[number].get("mtu") for number in (source, node) if number in told}
    known = ", ".join(f"{size} on node {number}" for number, size in sizes.items())
    return (
        f"{course.who(source)} to {course.who(node)}: small packets pass and large ones are "
        f"lost. Probably the MTU ({known}) is larger than what the network between them carries. "
        "Make it the same on all nodes and switches, or smaller"
    )


def _versions(course: Course, told: Mapping[int, Mapping[str, str | None]]) -> Iterator[Finding]:
    """Versions that differ: the job would fail, or hang, or train differently by node."""
    names = next(iter(told.values()), {})
    for name in names:
        having = defaultdict(list)
        for node, versions in sorted(told.items()):
            having[versions[name]].append(node)
        if len(having) > 1:
            usual = max(having.values(), key=len)
            odd = [course.who(node) for node in sorted(told) if node not in usual]
            each = "; ".join(f"{it or 'none'} on node {_numbers(on)}" for it, on in having.items())
            text = f"{name} is not the same on all nodes: {each}. Mend {', '.join(odd[:_MANY])}"
            yield Finding(text, fatal=True)


def _clocks(course: Course, told: Told) -> Iterator[Finding]:
    """Clocks that are off, as node 0 sees them."""
    for node, link in sorted(told.get(0, {"links": {}})["links"].items()):
        ahead = link.get("clock", 0.0)
        if abs(ahead) > _CLOCK + link.get("seconds", 0.0):
            side = "ahead of" if ahead > 0 else "behind"
            text = (
                f"the clock of {course.who(int(node))} is {abs(ahead):.1f} s {side} node 0's: "
                "logs will be out of order; from 5 minutes on AWS refuses requests. Start chrony"
            )
            yield Finding(text, fatal=False)


def _space(course: Course, told: Told) -> Iterator[Finding]:
    for node, record in sorted(told.items()):
        spaces = [("shm", "/dev/shm", record["shm"])]  # noqa: S108 - the kernel's own name
        spaces += [("disk", folder, space) for folder, space in record["disks"].items()]
        for kind, folder, space in spaces:
            if space and space[0] < _LITTLE[kind]:
                text = f"{folder} of {course.who(node)} has only {human_size(space[0])} free"
                more = " (a container: --shm-size, --ipc=host)" if kind == "shm" else ""
                yield Finding(text + more, fatal=space[0] < _LEAST[kind])


def all_links(told: Told) -> Iterator[tuple[int, int, Record]]:
    """From, to, and the state of each link that somebody told of."""
    for source, record in sorted(told.items()):
        for node, link in sorted(record["links"].items(), key=lambda item: int(item[0])):
            yield source, int(node), link


def _numbers(nodes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))


def _speed(rate: float) -> str:
    return f"{rate / 1e6:.1f} MB/s"


def human_size(count: float) -> str:
    """``8 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:  # noqa: PLR2004 - binary units
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
