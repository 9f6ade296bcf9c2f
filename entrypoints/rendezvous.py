"""Where the nodes of a job meet: an address of the first node, and a port that is nobody else's."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import random
import re
import secrets
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
"""File in the run's folder: where the nodes of this attempt meet, and the key they share."""

_PORTS = range(10_000, 30_000)
"""Below the ephemeral range (32768), where any outgoing connection may take a port."""
_TRIES = 100
_PATIENCE = 180.0
_HURRY = 30.0
"""Seconds for node 0 to name the port; fewer where the job is to be tested first."""
_HERE = "127.0.0.1"
_KEY = 32
"""Bytes of the key that the nodes share."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes' launchers meet: at `port` of the address `host` of node 0."""

    host: str
    port: int
    name: str
    node: int
    count: int
    local: str
    """This node's own address, on the interface that was chosen."""
    key: bytes
    """What only the nodes of this attempt know."""
    held: socket.socket | None = None
    """The socket of `port`, on node 0: nobody else can have it, and torchrun will listen on it."""

    def options(self) -> list[str]:
        """Options for torchrun, as `elastic` takes them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        held = f",fd={self.held.fileno()}" if self.held else ""
        return [
            "--rdzv-backend=deploykit",
            f"--rdzv-endpoint={host}:{self.port}",
            f"--rdzv-id={self.name}",
            f"--rdzv-conf=node={self.node},count={self.count}{held}",
            f"--local-addr={self.local}",
        ]


def alone(env: Environ) -> Rendezvous:
    """One node meets itself, where no other machine can come."""
    return Rendezvous(_HERE, 0, name(env), 0, 1, _HERE, secrets.token_bytes(_KEY))


def below(env: Environ, cluster: Cluster, local: str, port: int, key: bytes) -> Rendezvous:
    """For machines that AWS's own launcher has brought together; they share no folder.

    Only the first one knows its own address for sure.
    """
    host = local if cluster.node == 0 else ""
    return Rendezvous(host, port, name(env), cluster.node, len(cluster.hosts), local, key)


def meet(cluster: Cluster, env: Environ, local: str) -> Rendezvous:
    """Where to meet. `local` is this node's address; the first node listens on its own alone."""
    path, held = _port_file(env), None
    if cluster.node == 0:
        held = _reserve(local, _ports(env))
        _publish(path, env, held)
    patience = _HURRY if env.get("DEPLOYKIT_PREFLIGHT") else _PATIENCE
    told = _published(cluster, env, patience)
    key, nodes = bytes.fromhex(told["key"]), len(cluster.hosts)
    return Rendezvous(told["host"], told["port"], name(env), cluster.node, nodes, local, key, held)


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


def _reserve(address: str, ports: Iterable[int]) -> socket.socket:
    """Take the first port of `address` that is free. torchrun gets the socket itself.

    Without SO_REUSEADDR nobody else can bind it, another user neither (socket(7) of Linux).
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        held = socket.socket(family)
        try:
            held.bind((address, port))
        except OSError as error:
            held.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise BadEnvironment(f"This node has no address {address}: {error}") from None
            continue
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


def _publish(path: Path, env: Environ, held: socket.socket) -> None:
    """Tell the other nodes, and nobody else. The file is there already and is written in place: a
    network file system shows that to whoever opens it, and a new name perhaps a minute later.
    """
    host, port = held.getsockname()[:2]
    record = {
        "host": host,
        "port": port,
        "key": secrets.token_hex(_KEY),
        "launch": name(env),
        "pid": os.getpid(),
    }
    path.touch(0o600)
    path.chmod(0o600)
    private.write(path, json.dumps(record) + "\n")


def _published(cluster: Cluster, env: Environ, patience: float) -> ends.Record:
    """What node 0 tells. An earlier attempt's word is not believed."""
    path = _port_file(env)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        told = ends.read(path)
        if told is not None and told.get("launch") == name(env) and _current(cluster, told):
            return told
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
