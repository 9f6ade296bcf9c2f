"""torchrun with a rendezvous that unpickles nothing and listens on one address.

    launch.py --torchrun TORCHRUN_OPTIONS... PROGRAM ARGS...

A TCPStore has no authentication: everyone who can connect can write to it. torchrun's c10d
rendezvous keeps a pickle there, so an attacker could run code as the user; its static rendezvous
never restarts the other nodes. Here the nodes are known from the start and count themselves in for
each round of ranks. They read a number from the store, and torchrun reads JSON.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore, run
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from deploykit_node import log
from deploykit_node.restart import checkpoints, decision

T = TypeVar("T")

BACKEND = "deploykit"
"""The rendezvous' name in torchrun's options."""
ROUND = "DEPLOYKIT_ROUND"
"""Variable that tells the ranks how many rounds came before theirs, the same on all nodes.

torchrun's own count includes only the failures of its node.
"""

_PATIENCE = 600
"""Seconds for the other nodes to join a round, as in torchrun's own rendezvous."""
_PAUSE = 0.1
_CLOSED = "closed"


class Nodes(NamedTuple):
    """The number of this node, and how many there are."""

    node: int
    total: int
    host: str
    """The address of node 0, on which it listens."""


class FixedNodes(RendezvousHandler):
    """The rendezvous of a fixed set of nodes.

    `control` is a store that they share. In each round node 0 opens another store for the ranks.
    """

    def __init__(self, name: str, nodes: Nodes, control: Store) -> None:
        self._name, self._nodes, self._control = name, nodes, control
        self._round = 0
        self._ranks: TCPStore | None = None
        self._checkpoints: checkpoints.Snapshot = {}
        """Those at the beginning of the round."""

    def get_backend(self) -> str:
        """The name of this rendezvous backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the store of `next_rendezvous`: always."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes, and return where their ranks meet.

        Raises a RendezvousError if a node has given up or does not join within ten minutes, or if
        another round would fail as the last one.
        """
        if self._round:
            self._consider()
        self._round += 1
        if self._reach(lambda: self._control.add(self._key("joined"), 1)) == self._nodes.total:
            self._control.set(self._key("full"), "yes")
        self._await(self._key("full"))
        if self._nodes.node == 0:
            self._ranks = listening_store(self._nodes.host)
            self._control.set(self._key("port"), str(self._ranks.port))
        self._await(self._key("port"))
        port = int(self._reach(lambda: self._control.get(self._key("port"))))
        store_info = RendezvousStoreInfo(self._nodes.host, port)
        os.environ[ROUND] = str(self._round - 1)
        self._checkpoints = checkpoints.snapshot(os.environ.get("DEPLOYKIT_CHECKPOINT_DIR", ""))
        shared = PrefixStore(self._key("torchrun"), self._control)
        return RendezvousInfo(shared, self._nodes.node, self._nodes.total, store_info)

    def _consider(self) -> None:
        """Decide whether another round may begin, on the node of the rank that failed.

        Waits before it if the last ones were in vain. Raises RendezvousClosedError if none may.
        """
        ranks, env = Path(os.environ.get("DEPLOYKIT_RANK_DIR", "")), dict(os.environ)
        if decision.policy(env)[0] != "cause":
            return
        error = decision.root(env, ranks, alone=self._nodes.total == 1)
        if error is None or error["rank"] // error["local_world_size"] != self._nodes.node:
            return
        saved = checkpoints.newest(self._checkpoints, env.get("DEPLOYKIT_CHECKPOINT_DIR", ""))
        decided = decision.after_failure(env, error, saved or "")
        log.say(self._nodes.node, decided.why)
        if not decided.restart:
            self.set_closed()
            raise RendezvousClosedError(decided.why)
        if decided.wait:
            log.say(self._nodes.node, f"waiting {decided.wait:g} s before the restart")
            time.sleep(decided.wait)

    def num_nodes_waiting(self) -> int:
        """How many nodes have ended this round and wait for the next one."""
        return self._reach(lambda: self._control.add(self._key("joined", self._round + 1), 0))

    def is_closed(self) -> bool:
        """Whether a node has closed the rendezvous."""
        return self._reach(lambda: self._control.check([_CLOSED]))

    def set_closed(self) -> None:
        """Close the rendezvous for all nodes."""
        self._reach(lambda: self._control.set(_CLOSED, "yes"))

    def get_run_id(self) -> str:
        """The name of the run and its attempt."""
        return self._name

    def shutdown(self) -> bool:
        """Tell nodes that wait for another round that none comes. False if that failed."""
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
                raise RendezvousTimeoutError(f"timed out after {_PATIENCE} s waiting for {key}")
            time.sleep(_PAUSE)

    @staticmethod
    def _reach(request: Callable[[], T]) -> T:
        try:
            return request()
        except DistError as error:
            raise RendezvousConnectionError(f"node 0 does not respond: {error}") from error


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
    node, count = _whole(parameters, "node"), _whole(parameters, "count")
    nodes = Nodes(node, count, host)
    if nodes.total == 1:
        return FixedNodes(parameters.run_id, nodes, HashStore())
    if nodes.node == 0:
        store = listening_store(host, _whole(parameters, "fd"))
        return FixedNodes(parameters.run_id, nodes, store)
    patience = dt.timedelta(seconds=_PATIENCE)
    return FixedNodes(parameters.run_id, nodes, TCPStore(host, int(port), timeout=patience))


def _whole(parameters: RendezvousParameters, name: str) -> int:
    number = parameters.get_as_int(name)
    if number is None:
        raise ValueError(f"--rdzv-conf requires {name}")
    return number


rendezvous_handler_registry.register(BACKEND, create)


def main(argv: Sequence[str]) -> None:
    """Run torchrun with `argv`.

    Exits with 1 where the ranks do not start again, or node 0 has gone: a node's log says why.
    """
    try:
        run.main(list(argv))
    except RendezvousClosedError:
        sys.exit(1)
    except RendezvousConnectionError as error:
        closed = re.search("got 0 bytes|reset by peer|[Bb]roken pipe", str(error))
        sys.exit("torchrun: node 0 has exited, so this node exits too" if closed else str(error))
