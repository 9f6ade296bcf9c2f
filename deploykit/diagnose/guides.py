"""Troubleshooting guides: pages from ``templates/troubleshooting/`` with a run's own values.

What a launcher logs about its node is the evidence: the interfaces, the one that was chosen, and
where the nodes meet. Without a run the pages contain placeholders such as ``RUN``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deploykit.job.model import LogLine
from deploykit.lib import render
from deploykit.lib.finding import Finding

_NETWORK = {
    re.compile(r"network: (\S+) \((\S+)\) is (?:on )?the route to another node \((\S+)\)"): (
        *("interface", "address", "peer"),
    ),
    re.compile(r"network: (?:keeping your )?(\S+=\S+(?: \S+=\S+)*)"): ("users",),
    re.compile(r"network: no interface (?:chosen, because|is set, since) (.+)"): ("problem",),
    re.compile(r"interfaces: (.+)"): ("interfaces",),
}
"""Lines of a launcher, and what of a node they tell."""
_MEETING = re.compile(r"node \d+ of \d+ \(.+?\): rendezvous at (\S+) port (\d+)")
_EXCLUDED = ("lo", "docker", "veth", "br-", "virbr", "cni")
"""Beginnings of the names of interfaces that lead to no other node."""


@dataclass(frozen=True)
class Guide:
    """A page: its template, and in one line the symptom for which one reads it."""

    template: str
    symptom: str


GUIDES = {
    "nccl": Guide("nccl-socket-ifname.md.j2", "ranks hang or fail when they connect (NCCL, Gloo)"),
    "rendezvous": Guide("rendezvous.md.j2", "torchrun's nodes cannot find each other"),
    "security-groups": Guide("security-groups.md.j2", "AWS drops packets between the nodes"),
    "efa": Guide("efa.md.j2", "EFA fails, or NCCL uses plain sockets instead"),
    "slurm-pending": Guide("slurm-pending.md.j2", "a Slurm job stays pending"),
}
"""The guides, by the name that the command line takes."""

BY_CAUSE = {
    "net_iface_wrong": "nccl",
    "nccl_init_timeout": "nccl",
    "p2p_error": "nccl",
    "net_unreachable": "nccl",
    "net_blocked": "rendezvous",
    "rdzv_timeout": "rendezvous",
    "port_in_use": "rendezvous",
    "dns_failure": "rendezvous",
    "job_never_starts": "slurm-pending",
    "efa_error": "efa",
    "ofi_plugin_incompatible": "efa",
}
"""The guide to read for a cause that diagnose names."""


@dataclass
class NodeNetwork:
    """What the launcher of a node logged about its network; empty where it logged nothing."""

    node: int
    interface: str = ""
    address: str = ""
    peer: str = ""
    interfaces: str = ""
    """Every interface of the node with its addresses."""
    users: str = ""
    """Variables that the user had set, which the launcher kept."""
    problem: str = ""
    """Why no interface was chosen."""


@dataclass
class GuideContext:
    """What a guide knows about a run or a job file; placeholders where it knows nothing."""

    run: str = "RUN"
    backend: str = ""
    job: str = "JOB_ID"
    """The job's id at its target."""
    state: str = ""
    reason: str = ""
    file: str = "job.yaml"
    host: str = "HOST"
    """The address at which the nodes met."""
    port: str = "PORT"
    nodes: list[NodeNetwork] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """What doctor found."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the backend's section of the job file."""

    @property
    def known(self) -> bool:
        """Whether the guide is about a run."""
        return bool(self.state)

    @property
    def without_vpc(self) -> bool:
        """Whether the job runs in a network of the service, which has no groups of the user's."""
        return bool(self.settings) and not self.settings.get("subnets")

    @property
    def region(self) -> str:
        """The region to show in commands."""
        return str(self.settings.get("region", "REGION"))

    @property
    def group(self) -> str:
        """The security group to show in commands."""
        return str(self.settings.get("security_group_ids", "GROUP")).partition(", ")[0]

    @property
    def unchecked(self) -> bool:
        """Whether the page must name all rules, since those of the job are not known."""
        severities = {finding.severity for finding in self.findings}
        codes = {finding.code for finding in self.findings}
        return not self.settings or "unchecked" in severities or "credentials" in codes

    @property
    def interfaces(self) -> list[str]:
        """The interfaces that the nodes chose, each once."""
        return list(dict.fromkeys(node.interface for node in self.nodes if node.interface))

    @property
    def example(self) -> str:
        """The interface to show in commands."""
        return next(iter(self.interfaces), "ens5")

    @property
    def excluded(self) -> str:
        """A value of NCCL_SOCKET_IFNAME that leaves out whatever leads to no other node."""
        return f"^{','.join(_EXCLUDED)}"


def read_nodes(context: GuideContext, lines: Iterable[LogLine]) -> None:
    """Add what the launchers logged about the network; the newest attempt counts."""
    by_node: dict[int, NodeNetwork] = {}
    for line in lines:
        if line.rank is not None:
            continue
        if match := _MEETING.search(line.text):
            context.host, context.port = match[1], match[2]
        elif "network: " in line.text or "interfaces: " in line.text:
            node = by_node.setdefault(line.node or 0, NodeNetwork(line.node or 0))
            for pattern, names in _NETWORK.items():
                if match := pattern.search(line.text):
                    vars(node).update(zip(names, match.groups(), strict=True))
    context.nodes = [by_node[number] for number in sorted(by_node)]


def page(name: str, context: GuideContext) -> str:
    """The guide `name` as Markdown."""
    text = render.markdown(f"troubleshooting/{GUIDES[name].template}", context=context)
    return re.sub(r"\n{3,}", "\n\n", text)
