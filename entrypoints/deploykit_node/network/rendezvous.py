"""Where the nodes of a job meet: an address of node 0, and a port that no other program has."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploykit_node import packages, records
from deploykit_node.cluster import BadEnvironment, Cluster, Environ
from deploykit_node.network.gathering import Pause

PORT_FILE = "rendezvous.json"
"""File in the run folder: where the nodes of this attempt meet, and the key they share."""

_PORTS = range(10_000, 30_000)
"""Below the ephemeral range (32768), where any outgoing connection may take a port."""
_TRIES = 100
_PATIENCE = 180.0
_PREFLIGHT_PATIENCE = 30.0
_INSTALL_PATIENCE = 3600.0
"""Seconds for node 0 to publish the port; fewer if the preflight test comes first, and more if the
nodes install packages first, which takes some of them longer than others."""
_LOOPBACK = "127.0.0.1"
_SAGEMAKERS = 7777
"""MASTER_PORT of AWS's launcher, which `deploykit doctor` expects to be open."""
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 0.5
"""Seconds between the first two readings of the port, and between two later ones of few nodes."""
_READS = 500.0
"""How often the port is read in a second at most, by all nodes together."""
_KEY = 32
"""Bytes of the key that the nodes share."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes' launchers meet: `port` of the address `host` of node 0."""

    host: str
    port: int
    name: str
    node: int
    count: int
    local: str
    """This node's own address on the chosen interface."""
    key: bytes
    """A secret of the nodes of this attempt."""
    held: socket.socket | None = None
    """The bound socket of `port` on node 0, where torchrun will listen."""

    def options(self) -> list[str]:
        """Options for torchrun, as `elastic` reads them."""
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
    """The rendezvous of a single node, on loopback, which other machines cannot reach."""
    return Rendezvous(_LOOPBACK, 0, name(env), 0, 1, _LOOPBACK, secrets.token_bytes(_KEY))


def reserved(env: Environ) -> Rendezvous:
    """The same, with a port of loopback that is free for the program."""
    held = _reserve(_LOOPBACK, _ports(env))
    return replace(alone(env), port=held.getsockname()[1], held=held)


def by_name(cluster: Cluster, env: Environ, local: str) -> Rendezvous:
    """The rendezvous of machines that share no folder and have no launcher above.

    The port is SageMaker's own, or the lowest of DEPLOYKIT_PORTS.
    """
    port = _ports(env)[0] if env.get("DEPLOYKIT_PORTS") else _SAGEMAKERS
    return Rendezvous(
        cluster.hosts[0], port, name(env), cluster.node, len(cluster.hosts), local, b""
    )


def below_launcher(env: Environ, cluster: Cluster, local: str, port: int, key: bytes) -> Rendezvous:
    """The rendezvous of machines that AWS's launcher has connected; they share no folder.

    `local` is this node's address. Only node 0 is sure of its own address.
    """
    host = local if cluster.node == 0 else ""
    return Rendezvous(host, port, name(env), cluster.node, len(cluster.hosts), local, key)


def meet(cluster: Cluster, env: Environ, local: str) -> Rendezvous:
    """Agree on a port through the run folder. Node 0 listens on its address `local` alone.

    Raises BadEnvironment if no port is free, or node 0 publishes none in time.
    """
    path, held = _port_file(env), None
    if cluster.node == 0:
        held = _reserve(local, _ports(env))
        _publish(path, env, held)
    patience = _PREFLIGHT_PATIENCE if env.get("DEPLOYKIT_PREFLIGHT") else _PATIENCE
    patience = _INSTALL_PATIENCE if packages.VARIABLE in env else patience
    record = _published(cluster, env, patience)
    key, nodes = bytes.fromhex(record["key"]), len(cluster.hosts)
    host, port = record["host"], record["port"]
    return Rendezvous(host, port, name(env), cluster.node, nodes, local, key, held)


def name(env: Environ) -> str:
    """The run and its attempt, ``digits-1.0``, and the generation where the nodes may change."""
    run = env.get("DEPLOYKIT_RUN") or env.get("SLURM_JOB_ID") or "run"
    generation = env.get("DEPLOYKIT_GENERATION")
    return f"{run}.{records.attempt(env)}" + (f".{generation}" if generation else "")


def _ports(env: Environ) -> list[int]:
    """Ports to try in this order: random ones, or upwards if the site leaves only some open."""
    text = env.get("DEPLOYKIT_PORTS")
    if not text:
        return random.sample(_PORTS, _TRIES)
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]) < 2**16:
        raise BadEnvironment(
            f"DEPLOYKIT_PORTS is {text!r}; it must be a range such as 20000-20100."
        )
    return list(range(int(match[1]), int(match[2]) + 1))


def _reserve(address: str, ports: Iterable[int]) -> socket.socket:
    """Bind the first free port of `address`; torchrun inherits the socket.

    Without SO_REUSEADDR no other process of any user can bind it (socket(7) of Linux).
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        held = socket.socket(family)
        try:
            held.bind((address, port))
        except OSError as error:
            held.close()
            if error.errno == errno.EADDRNOTAVAIL:
                text = f"The address {address} is not assigned to this node: {error}"
                raise BadEnvironment(text) from None
            continue
        return held
    raise BadEnvironment(
        "No TCP port is free on this node for the rendezvous. "
        "List the ports in use with `ss -ltn`, and set DEPLOYKIT_PORTS to a free range, such as "
        "20000-20100."
    )


def _port_file(env: Environ) -> Path:
    try:
        return Path(env["DEPLOYKIT_RUN_DIR"], PORT_FILE)
    except KeyError:
        raise BadEnvironment(
            "The nodes of a job find each other through the run folder: "
            "set DEPLOYKIT_RUN_DIR to a folder that all nodes share."
        ) from None


def _publish(path: Path, env: Environ, held: socket.socket) -> None:
    """Write the port and the key for the user's own processes on the other nodes.

    The file exists already and is written in place: a network file system shows that to the next
    reader, while a new name may take a minute to appear.
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
    records.write_text(path, json.dumps(record) + "\n")


def _published(cluster: Cluster, env: Environ, patience: float) -> dict[str, Any]:
    """What node 0 has published in this attempt, within `patience` seconds."""
    path = _port_file(env)
    deadline = time.monotonic() + patience
    pause = Pause(_FIRST_PAUSE, max(_LAST_PAUSE, len(cluster.hosts) / _READS))
    while time.monotonic() < deadline:
        record = records.read(path)
        if record is not None and record.get("launch") == name(env) and _current(cluster, record):
            return record
        time.sleep(pause.seconds())
    raise BadEnvironment(
        f"Node 0 wrote no port to {path} within {patience:g} seconds. "
        "Check the log of node 0, and start all nodes with the same DEPLOYKIT_RUN_DIR."
    )


def _current(cluster: Cluster, record: dict[str, Any]) -> bool:
    """Whether the author of the file is alive; True if it runs on another machine."""
    if cluster.launcher != "emulated":
        return True
    try:
        os.kill(record["pid"], 0)
    except ProcessLookupError:
        return False
    return True
