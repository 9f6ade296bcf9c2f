"""Where the nodes of a job meet: the first node's address, and a port that is nobody else's."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import re
import shutil
import socket
import subprocess
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import ends
from cluster import BadEnvironment, Cluster, Environ

_PORTS = range(10_000, 30_000)
"""Below the ephemeral range (32768), where any outgoing connection may take a port."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes' launchers meet, in the words of ``torchrun``."""

    host: str
    port: int
    name: str
    is_host: bool
    local: str

    def options(self) -> list[str]:
        """Options for torchrun. `is_host` is said outright, so that no job uses another's store."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={host}:{self.port}",
            f"--rdzv-id={self.name}",
            f"--rdzv-conf=is_host={int(self.is_host)}",
            f"--local-addr={self.local}",
        ]


def alone(env: Environ) -> Rendezvous:
    """One node meets itself, on a port that the system chooses."""
    return Rendezvous("localhost", 0, _name(env), is_host=True, local="localhost")


def meet(cluster: Cluster, env: Environ, *, master: str, local: str) -> Rendezvous:
    """Where to meet. `master` is the first node's address as seen here, `local` this node's."""
    return Rendezvous(
        master, _port(cluster, env), _name(env), is_host=cluster.node == 0, local=local
    )


def _name(env: Environ) -> str:
    run = env.get("DEPLOYKIT_RUN") or env.get("SLURM_JOB_ID") or "run"
    return f"{run}.{ends.attempt(env)}"


def peer_address(cluster: Cluster) -> str:
    """Address of another node. Loopback is refused unless all nodes are this one machine."""
    peer = cluster.peer
    assert peer is not None  # noqa: S101 - asked only where there are several nodes
    found = address(peer)
    if is_loopback(found):
        elsewhere = [host for host in cluster.hosts if not is_loopback(address(host))]
        if elsewhere:
            raise BadEnvironment(
                f"The host name {peer} means {found} here, this machine itself, while "
                f"{elsewhere[0]} is elsewhere. Give {peer} its own address in /etc/hosts or DNS."
            )
    return found


def address(host: str) -> str:
    """An address of `host` that other nodes can use, if it has one; else a loopback address.

    A name that does not resolve, or only to loopback, is looked up in Slurm's configuration.
    """
    found = _resolve(host)
    if not found or is_loopback(found[0]):
        found = sorted(found + _resolve(_slurm_address(host)), key=_usefulness)
    if not found:
        raise BadEnvironment(
            f"The host name {host} of a node of this job does not resolve here. "
            "Add it to DNS or /etc/hosts of every node, or to NodeAddr in slurm.conf."
        )
    return found[0]


def is_loopback(text: str) -> bool:
    return ipaddress.ip_address(text).is_loopback


def _resolve(host: str | None) -> list[str]:
    """Addresses of `host`, the most useful first."""
    if not host:
        return []
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]).partition("%")[0] for entry in found}, key=_usefulness)


def _usefulness(text: str) -> tuple[bool, bool, int]:
    parsed = ipaddress.ip_address(text)
    return parsed.is_loopback, parsed.is_link_local, parsed.version


def _slurm_address(node: str) -> str | None:
    """NodeAddr of a Slurm node."""
    if shutil.which("scontrol") is None:
        return None
    argv = ["scontrol", "show", "node", "--oneliner", node]
    try:
        shown = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False).stdout
    except subprocess.TimeoutExpired:
        return None
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found[1] if found else None


def _port(cluster: Cluster, env: Environ) -> int:
    if cluster.launcher == "slurm":
        return _PORTS.start + int(env["SLURM_JOB_ID"]) % len(_PORTS)
    if cluster.launcher == "emulated":
        return _publish_port(env) if cluster.node == 0 else _published_port(env)
    return _PORTS.start + zlib.crc32(env.get("DEPLOYKIT_RUN", "").encode()) % len(_PORTS)


def _port_file(env: Environ) -> Path:
    try:
        return Path(env["DEPLOYKIT_RUN_DIR"], "rendezvous.json")
    except KeyError:
        raise BadEnvironment(
            "Several nodes on one machine find each other through the run's folder: "
            "set DEPLOYKIT_RUN_DIR to one folder for all of them."
        ) from None


def _publish_port(env: Environ) -> int:
    port = _free_port()
    ends.write(_port_file(env), {"port": port, "pid": os.getpid()})
    return port


def _published_port(env: Environ, patience: float = 60) -> int:
    """The port that node 0 chose. A file whose author is gone is an earlier attempt's."""
    path = _port_file(env)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            told = json.loads(path.read_text())
            os.kill(told["pid"], 0)
        except (FileNotFoundError, ProcessLookupError):
            time.sleep(0.05)
        else:
            return int(told["port"])
    raise BadEnvironment(
        f"Node 0 said nothing in {path} within {patience:g} seconds. "
        "See the log of node 0, and start all nodes with the same DEPLOYKIT_RUN_DIR."
    )


def _free_port() -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise BadEnvironment(f"No free TCP port was found in {_PORTS.start}-{_PORTS.stop - 1}.")
