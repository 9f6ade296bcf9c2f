"""A parameter server over RPC: workers send gradients without waiting for each other.

    torchrun --standalone --nproc-per-node=3 parameter_server.py
    deploykit submit --backend local            # or slurm; with the job file in this folder

Rank 0 holds the weights and assigns the batches. Every other rank is a worker. Push and pull are
one call: a worker sends a gradient and receives the number of its next batch and the current
weights. The staleness of a worker's next gradient is the number of updates by other workers until
its next call. The design is from Li et al., https://www.usenix.org/conference/osdi14 (parameter
server).

--max-staleness N limits it. A gradient is held back as long as applying it would make an unfinished
gradient staler than N. Held-back gradients are applied together, as one update. N = 0 is
synchronous training, which --synchronous selects. Gradients are summed, not averaged: each one
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
"""The next step, or None after the last one, and the weights as one vector."""


class Waiting(NamedTuple):
    """A gradient that may not be applied yet, and the call that delivered it."""

    worker: int
    read: int  # version of the weights that it was computed with
    gradient: Tensor
    answer: Future[Answer]


class Server:
    """The weights on rank 0. The RPC agent calls `exchange` from several threads."""

    def __init__(self, options: argparse.Namespace, workers: int) -> None:
        self.options, self.bound, self.workers = options, options.max_staleness, workers
        self.weights = parameters_to_vector(digits.network(options).parameters()).detach()
        self.steps = iter(range(digits.steps(options, workers)))
        self.version = 0
        self.arrived: list[tuple[int, Future[Answer]]] = []
        self.read: dict[int, int] = {}  # version by worker, while it computes
        self.waiting: list[Waiting] = []
        self.staleness: Counter[int] = Counter()
        self.lock = threading.Lock()
        self.began = self.ended = 0.0

    def exchange(self, worker: int, gradient: Tensor | None) -> Future[Answer]:
        """Accept a gradient and respond once it is applied; without one, once all have joined."""
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
        answer.set_result((step, self.weights.clone()))  # a copy: it is sent later

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
    """The server of this process; only rank 0 has one."""
    return Server(parse(), int(os.environ["WORLD_SIZE"]) - 1)


@rpc.functions.async_execution
def exchange(worker: int, gradient: Tensor | None) -> Future[Answer]:
    """Called by workers, runs on rank 0. A call that waits occupies no thread."""
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
        sys.exit("no workers: start it with torchrun --nproc-per-node=3, or more")
    if rank == 0:
        server()
    # Without an interface, TensorPipe resolves the host name. deploykit sets the interface that
    # leads to the other nodes for gloo.
    for interface in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[:1]):
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
    warnings.filterwarnings("ignore", message="You are using a Backend")  # init_rpc's own, in 2.13
    name = "server" if rank == 0 else f"worker{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world)
    if rank:
        work(options, rank)
    rpc.shutdown()  # waits for all ranks, and serves them until then
    if rank == 0:
        print(server().report(), flush=True)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = digits.parser(str(__doc__))
    parser.add_argument(
        "--max-staleness", type=int, metavar="N", help="maximum staleness; default: unlimited"
    )
    parser.add_argument(
        "--straggler", type=float, default=0, metavar="SECONDS", help="delay of rank 1 per step"
    )
    options = parser.parse_args()
    if options.max_staleness is None:
        options.max_staleness = 0 if options.synchronous else math.inf
    return options


if __name__ == "__main__":
    main()
