"""torchrun with a rendezvous of ours, which unpickles nothing and listens on one address.

    python .deploykit/elastic.py OPTIONS OF TORCHRUN -- PROGRAM ARGS

A TCPStore has no authentication: anyone who reaches it can write to it. torchrun's c10d rendezvous
keeps a pickle there, so an attacker ran code as the user; its static one never restarts the other
nodes. Here the nodes are known from the start, and count themselves in for each round of ranks.
What they read from the store is a number, and what torchrun reads is JSON.
"""

from __future__ import annotations

import datetime as dt
import os
import socket
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore, run
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

T = TypeVar("T")

BACKEND = "deploykit"
ROUND = "DEPLOYKIT_ROUND"
"""Variable that tells the ranks how many rounds there were before theirs, alike on all nodes.

torchrun counts for each node the failures of that node alone.
"""

_PATIENCE = 600
"""Seconds for the other nodes to come to a round, as torchrun's own rendezvous has."""
_PAUSE = 0.1
_CLOSED = "closed"


class Nodes(NamedTuple):
    """One node among those of the job."""

    node: int
    count: int
    host: str
    """The address of node 0, on which it listens."""


class FixedNodes(RendezvousHandler):
    """The rendezvous of nodes whose number does not change.

    `control` is a store that they share. In each round node 0 holds one more for the ranks.
    """

    def __init__(self, name: str, nodes: Nodes, control: Store) -> None:
        self._name, self._nodes, self._control = name, nodes, control
        self._round = 0
        self._ranks: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes, and learn where their ranks meet.

        Raises a RendezvousError where a node has given up, or does not come within ten minutes.
        """
        self._round += 1
        if self._reach(lambda: self._control.add(self._key("joined"), 1)) == self._nodes.count:
            self._control.set(self._key("full"), "yes")
        self._await(self._key("full"))
        if self._nodes.node == 0:
            self._ranks = listening_store(self._nodes.host)
            self._control.set(self._key("port"), str(self._ranks.port))
        self._await(self._key("port"))
        where = RendezvousStoreInfo(self._nodes.host, self._port())
        os.environ[ROUND] = str(self._round - 1)
        shared = PrefixStore(self._key("torchrun"), self._control)
        return RendezvousInfo(shared, self._nodes.node, self._nodes.count, where)

    def num_nodes_waiting(self) -> int:
        """How many nodes have ended this round and wait for the next one."""
        return self._reach(lambda: self._control.add(self._key("joined", self._round + 1), 0))

    def is_closed(self) -> bool:
        return self._reach(lambda: self._control.check([_CLOSED]))

    def set_closed(self) -> None:
        self._reach(lambda: self._control.set(_CLOSED, "yes"))

    def get_run_id(self) -> str:
        return self._name

    def shutdown(self) -> bool:
        """Tell nodes that wait for another round that there is none."""
        try:
            self.set_closed()
        except RendezvousConnectionError:  # node 0 has gone, and the store with it
            return False
        return True

    def _key(self, what: str, number: int | None = None) -> str:
        return f"{number or self._round}/{what}"

    def _await(self, key: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not self._reach(lambda: self._control.check([key])):
            if self.is_closed():
                raise RendezvousClosedError
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"{key} is missing after {_PATIENCE} seconds")
            time.sleep(_PAUSE)

    def _port(self) -> int:
        text = self._reach(lambda: self._control.get(self._key("port")))
        if not text.isdigit() or not 0 < int(text[:6]) < 2**16:
            raise RendezvousStateError(f"the ranks' port is {text[:20]!r}")
        return int(text)

    @staticmethod
    def _reach(ask: Callable[[], T]) -> T:
        try:
            return ask()
        except DistError as error:
            raise RendezvousConnectionError(f"node 0 does not answer: {error}") from error


def listening_store(host: str, held: int | None = None) -> TCPStore:
    """A store that listens on the address `host` alone, or on the socket of descriptor `held`.

    TCPStore itself would listen on every address of the machine.
    """
    if held is None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family)
        listener.bind((host, 0))
    else:
        listener = socket.socket(fileno=held)
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def create(parameters: RendezvousParameters) -> FixedNodes:
    """The handler for torchrun's options: ``--rdzv-conf=node=1,count=2`` and, on node 0, ``fd``."""
    host, _, port = parameters.endpoint.rpartition(":")
    host = host.strip("[]")
    nodes = Nodes(parameters.get_as_int("node"), parameters.get_as_int("count"), host)
    if nodes.count == 1:
        return FixedNodes(parameters.run_id, nodes, HashStore())
    if nodes.node == 0:
        return FixedNodes(
            parameters.run_id, nodes, listening_store(host, parameters.get_as_int("fd"))
        )
    patience = dt.timedelta(seconds=_PATIENCE)
    return FixedNodes(parameters.run_id, nodes, TCPStore(host, int(port), timeout=patience))


rendezvous_handler_registry.register(BACKEND, create)

if __name__ == "__main__":
    run.main()
