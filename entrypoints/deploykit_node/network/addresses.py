"""Addresses of the job's host names, those that other nodes can reach first."""

from __future__ import annotations

import ipaddress
import re
import shutil
import socket
import subprocess

from deploykit_node.cluster import BadEnvironment, Cluster


def peer_addresses(cluster: Cluster) -> list[str]:
    """The addresses of another node of a cluster with several.

    Raises BadEnvironment if its name does not resolve, or resolves to loopback although the nodes
    are different machines.
    """
    peer = cluster.peer
    assert peer is not None  # noqa: S101 - callers have checked
    known = addresses(peer)
    best = known[0]
    if is_loopback(best):
        elsewhere = [host for host in cluster.hosts if not is_loopback(address(host))]
        if elsewhere:
            raise BadEnvironment(
                f"The host name {peer} resolves to {best} here, a loopback address, although the "
                f"job has other machines, such as {elsewhere[0]}. Give {peer} its own address in "
                "/etc/hosts or DNS."
            )
    return known


def address(host: str) -> str:
    """The best address of `host`. Raises BadEnvironment if the name does not resolve."""
    return addresses(host)[0]


def addresses(host: str) -> list[str]:
    """The addresses of `host`, those that other nodes can reach first.

    Slurm's configuration is consulted for a name that does not resolve, or only to loopback.
    Raises BadEnvironment if that does not help.
    """
    resolved = _resolve(host)
    if not resolved or is_loopback(resolved[0]):
        resolved = sorted([*resolved, *_resolve(_slurm_address(host))], key=_preference)
    if not resolved:
        raise BadEnvironment(
            f"The host name {host} does not resolve on this node. "
            "Add it to DNS, to /etc/hosts on every node, or to slurm.conf as NodeAddr."
        )
    return resolved


def is_loopback(text: str) -> bool:
    """Whether an IP address is a loopback address. Raises ValueError if it is no address."""
    return ipaddress.ip_address(text).is_loopback


def _resolve(host: str | None) -> list[str]:
    """The addresses of `host`, the best first; empty if it does not resolve."""
    if not host:
        return []
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]).partition("%")[0] for entry in entries}, key=_preference)


def _preference(text: str) -> tuple[bool, bool, int]:
    parsed = ipaddress.ip_address(text)
    return parsed.is_loopback, parsed.is_link_local, parsed.version


def _slurm_address(node: str) -> str | None:
    """NodeAddr of a Slurm node; None without Slurm."""
    if shutil.which("scontrol") is None:
        return None
    argv = ["scontrol", "show", "node", "--oneliner", node]
    try:
        output = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return None
    match = re.search(r"\bNodeAddr=(\S+)", output.stdout)
    return match[1] if match else None
