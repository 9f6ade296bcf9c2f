"""A parameter server over RPC: workers send gradients, and nobody waits for anybody.

    torchrun --standalone --nproc-per-node=3 parameter_server.py
    deploykit submit --backend local            # or slurm; the job file is beside this one

Rank 0 holds the weights and deals out the batches; every other rank is a worker. Reading and
sending are one call: a worker sends a gradient, and the answer is the next batch's number and the
weights as they are by then. What the others sent in between is the staleness of its next gradient.
The design is that of Li et al., https://www.usenix.org/conference/osdi14 (parameter server).

--max-staleness N bounds it. A gradient waits while applying it would make one that is still being
computed staler than N; those that waited are applied together, as one update. With N = 0 that is
synchronous training, so --synchronous means just this. Gradients are summed, not averaged: each
moves the weights as far as it would alone, and only its staleness differs.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import threading
import time
import warnings
from collections import Counter
from typing import NamedTuple

import digits
import staleness
import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Answer = tuple[int | None, Tensor]
"""The next step, or None when there is none left, and the weights, flat."""


class Waiting(NamedTuple):
    """A gradient that may not be applied yet, and the call that it came with."""

    worker: int
    read: int  # version of the weights behind it
    gradient: Tensor
    answer: Future[Answer]


class Server:
    """The weights, on rank 0. The RPC agent calls `exchange` from several threads at once."""

    def __init__(self, options: argparse.Namespace, workers: int) -> None:
        self.options, self.bound, self.workers = options, options.max_staleness, workers
        self.weights = parameters_to_vector(digits.network(options).parameters()).detach()
        self.steps = iter(range(digits.steps(options, workers)))
        self.version = 0
        self.arrived: list[tuple[int, Future[Answer]]] = []
        self.read: dict[int, int] = {}  # worker to version, while it computes
        self.waiting: list[Waiting] = []
        self.staleness: Counter[int] = Counter()
        self.lock = threading.Lock()
        self.began = self.ended = 0.0

    def exchange(self, worker: int, gradient: Tensor | None) -> Future[Answer]:
        """Take a gradient, and answer when it is applied; without one, when all are there."""
        answer: Future[Answer] = Future()
        with self.lock:
            if gradient is None:
                self._start(worker, answer)
            else:
                self.waiting.append(Waiting(worker, self.read.pop(worker), gradient, answer))
                staler = (self.version + 1 - read for read in self.read.values())
                if max(staler, default=0) <= self.bound:
                    self._apply()
        return answer

    def _start(self, worker: int, answer: Future[Answer]) -> None:
        self.arrived.append((worker, answer))
        if len(self.arrived) == self.workers:
            self.began = time.monotonic()
            for each in self.arrived:
                self._hand_out(*each)

    def _apply(self) -> None:
        together, self.waiting = self.waiting, []
        self.staleness.update(self.version - each.read for each in together)
        self.weights -= self.options.lr * torch.stack([each.gradient for each in together]).sum(0)
        self.version += 1
        self.ended = time.monotonic()
        for each in together:
            self._hand_out(each.worker, each.answer)

    def _hand_out(self, worker: int, answer: Future[Answer]) -> None:
        step = next(self.steps, None)
        if step is not None:
            self.read[worker] = self.version
        answer.set_result((step, self.weights.clone()))  # sent later, while others change them

    def report(self) -> str:
        """Test accuracy, samples per second and staleness."""
        network = digits.network(self.options)
        vector_to_parameters(self.weights, network.parameters())
        pixels, labels = digits.images("test")
        with torch.no_grad():
            result = digits.accuracy(network(pixels), labels)
        rate = self.staleness.total() * self.options.batch_size / (self.ended - self.began)
        names = {math.inf: "asynchronous", 0: "synchronous"}
        mode = names.get(self.bound, f"staleness at most {self.bound:.0f}")
        return staleness.report(f"parameter server, {mode}", result, rate, self.staleness)


@functools.cache
def server() -> Server:
    """The one of this process. Only rank 0 has any."""
    return Server(parse(), int(os.environ["WORLD_SIZE"]) - 1)


@rpc.functions.async_execution
def exchange(worker: int, gradient: Tensor | None) -> Future[Answer]:
    """Runs on rank 0, called by a worker. A call that has to wait holds no thread."""
    return server().exchange(worker, gradient)


def work(options: argparse.Namespace, rank: int) -> None:
    """Compute gradients until the server has no more batches."""
    network = digits.network(options)
    pixels, labels = digits.images("training")
    step, weights = rpc.rpc_sync("server", exchange, args=(rank, None))
    while step is not None:
        vector_to_parameters(weights, network.parameters())
        chosen = digits.batch(options, step)
        loss = cross_entropy(network(pixels[chosen]), labels[chosen])
        gradient = parameters_to_vector(torch.autograd.grad(loss, network.parameters()))
        time.sleep(options.straggler if rank == 1 else 0)
        step, weights = rpc.rpc_sync("server", exchange, args=(rank, gradient))


def main() -> None:
    """Be the server on rank 0, and a worker on the others."""
    options = parse()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        sys.exit("a server and no workers: start it with torchrun --nproc-per-node=3, or more")
    if rank == 0:
        server()
    # TensorPipe asks for the address of this host's name unless it is told an interface. deploykit
    # tells gloo the one that leads to the other nodes.
    for interface in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[:1]):
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
    warnings.filterwarnings("ignore", message="You are using a Backend")  # init_rpc's own, in 2.13
    name = "server" if rank == 0 else f"worker{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world)
    if rank:
        work(options, rank)
    rpc.shutdown()  # waits for all, and serves them until then
    if rank == 0:
        print(server().report(), flush=True)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = digits.parser(str(__doc__))
    parser.add_argument("--max-staleness", type=int, metavar="N", help="default: no bound")
    parser.add_argument("--straggler", type=float, default=0, metavar="SECONDS", help="of rank 1")
    options = parser.parse_args()
    if options.max_staleness is None:
        options.max_staleness = 0 if options.synchronous else math.inf
    return options


if __name__ == "__main__":
    main()
