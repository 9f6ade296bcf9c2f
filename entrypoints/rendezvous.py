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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ends
import private
from cluster import BadEnvironment, Cluster, Environ

PORT_FILE = "rendezvous.json"
"""File in the run's folder: the port at which the nodes of this attempt meet."""

_PORTS = range(10_000, 30_000)
"""Below the ephemeral range (32768), where any outgoing connection may take a port."""
_TRIES = 100
_PATIENCE = 180.0
_HURRY = 30.0
"""Seconds for node 0 to name the port; fewer where the job is to be tested first."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes' launchers meet, in the words of ``torchrun``."""

    host: str
    port: int
    name: str
    is_host: bool
    local: str
    held: socket.socket | None = None
    """Keeps other jobs away from the port, on the node that has it."""

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
    return Rendezvous("localhost", 0, name(env), is_host=True, local="localhost")


def meet(cluster: Cluster, env: Environ, *, master: str, local: str) -> Rendezvous:
    """Where to meet. `master` is the first node's address as seen here, `local` this node's."""
    host, path = cluster.node == 0, _port_file(env)
    held = _reserve(_ports(env)) if host else None
    if held is not None:
        port = int(held.getsockname()[1])
        _publish(path, env, port)
    else:
        port = _published(cluster, env, _HURRY if env.get("DEPLOYKIT_PREFLIGHT") else _PATIENCE)
    return Rendezvous(master, port, name(env), is_host=host, local=local, held=held)


def name(env: Environ) -> str:
    """The run and its attempt."""
    run = env.get("DEPLOYKIT_RUN") or env.get("SLURM_JOB_ID") or "run"
    return f"{run}.{ends.attempt(env)}"


def peer_addresses(cluster: Cluster) -> list[str]:
    """Addresses of another node. Loopback is refused unless all nodes are this one machine."""
    peer = cluster.peer
    assert peer is not None  # noqa: S101 - asked only where there are several nodes
    known = addresses(peer)
    found = known[0]
    if is_loopback(found):
        elsewhere = [host for host in cluster.hosts if not is_loopback(address(host))]
        if elsewhere:
            raise BadEnvironment(
                f"The host name {peer} means {found} here, this machine itself, while "
                f"{elsewhere[0]} is elsewhere. Give {peer} its own address in /etc/hosts or DNS."
            )
    return known


def address(host: str) -> str:
    """An address of `host` that other nodes can use, if it has one; else a loopback address."""
    return addresses(host)[0]


def addresses(host: str) -> list[str]:
    """Addresses of `host`, those that other nodes can use first.

    A name that does not resolve, or only to loopback, is looked up in Slurm's configuration.
    """
    found = _resolve(host)
    if not found or is_loopback(found[0]):
        found = sorted([*found, *_resolve(_slurm_address(host))], key=_usefulness)
    if not found:
        raise BadEnvironment(
            f"The host name {host} of a node of this job does not resolve here. "
            "Add it to DNS or /etc/hosts of every node, or to NodeAddr in slurm.conf."
        )
    return found


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


def _ports(env: Environ) -> list[int]:
    """Ports to try, in this order: the lowest first where the site leaves only some open."""
    text = env.get("DEPLOYKIT_PORTS")
    if not text:
        return random.sample(_PORTS, _TRIES)
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if found is None or not 0 < int(found[1]) <= int(found[2]) < 2**16:
        raise BadEnvironment(f"DEPLOYKIT_PORTS is {text!r}; write it as LOWEST-HIGHEST.")
    return list(range(int(found[1]), int(found[2]) + 1))


def _reserve(ports: Iterable[int]) -> socket.socket:
    """Take the first port that is free, so that nobody else does; torchrun still can.

    A port that is bound without SO_REUSEADDR and does not listen can be had by those alone who ask
    for it with SO_REUSEADDR, once that is set here too (socket(7) of Linux). The store of torchrun
    does; we do not.
    """
    for port in ports:
        held = socket.socket()
        try:
            held.bind(("", port))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held
    raise BadEnvironment(
        "No TCP port for the nodes to meet at is free on this node; "
        "see `ss -ltn`, and choose others with DEPLOYKIT_PORTS, such as 20000-20100."
    )


def _port_file(env: Environ) -> Path:
    try:
        return Path(env["DEPLOYKIT_RUN_DIR"], PORT_FILE)
    except KeyError:
        raise BadEnvironment(
            "The nodes of a job find each other through the run's folder: "
            "set DEPLOYKIT_RUN_DIR to one folder that all of them see."
        ) from None


def _publish(path: Path, env: Environ, port: int) -> None:
    """Tell the other nodes. The file is there already and is written in place: a network file
    system shows that to whoever opens it, and a new name perhaps a minute later.
    """
    record = {"port": port, "launch": name(env), "pid": os.getpid()}
    private.write(path, json.dumps(record) + "\n")


def _published(cluster: Cluster, env: Environ, patience: float) -> int:
    """The port that node 0 chose. An earlier attempt's is not believed."""
    path = _port_file(env)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        told = ends.read(path)
        if told is not None and told.get("launch") == name(env) and _current(cluster, told):
            return int(told["port"])
        time.sleep(0.05)
    raise BadEnvironment(
        f"Node 0 said nothing in {path} within {patience:g} seconds. "
        "See the log of node 0, and start all nodes with the same DEPLOYKIT_RUN_DIR."
    )


def _current(cluster: Cluster, told: ends.Record) -> bool:
    """Whether the author of the port still lives, where that can be seen: all on one machine."""
    if cluster.launcher != "emulated":
        return True
    try:
        os.kill(told["pid"], 0)
    except ProcessLookupError:
        return False
    return True
