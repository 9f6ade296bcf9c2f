"""Hogwild: processes on one node update the same weights in shared memory without locks.

    python hogwild.py --workers 2
    deploykit submit --backend local --set entrypoint.script=hogwild.py \
        --set resources.processes_per_node=1

Here, "lock-free" means that `weights -= lr * gradient` reads, subtracts and writes each element
without a lock. If two processes do this at the same time, an element may get both updates, or the
second write may replace the first. The first update is then lost, silently and differently in each
run. A forward pass may read some weights from before an update and some from after it. No element
is ever half written, because an aligned float is stored atomically. The weights are therefore
always the result of applying the surviving updates in some order, but no seed reproduces them.

Niu et al., https://arxiv.org/abs/1106.5730, prove that this converges if each gradient touches few
weights. Here each gradient touches nearly all of them, so the proof does not apply, but training
works anyway. `tally` has the same size as the weights and is updated the same way, to count lost
updates.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from threading import Barrier
from typing import NamedTuple

import digits
import staleness
import torch
from torch import Tensor, multiprocessing
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Shared(NamedTuple):
    """What all processes share; every tensor is in shared memory."""

    weights: Tensor  # (weights,)
    tally: Tensor  # (weights,); each update adds 1 to every element
    gradients: Tensor  # (workers, weights), in the synchronous mode
    applied: Tensor  # (workers,), gradients that each worker has applied
    staleness: Tensor  # (steps,)
    clock: Tensor  # (workers, 2), start and end in seconds
    barrier: Barrier


def work(worker: int, options: argparse.Namespace, shared: Shared) -> None:
    """Compute and apply this worker's gradients."""
    torch.set_num_threads(1)
    network = digits.network(options)
    vector_to_parameters(shared.weights, network.parameters())  # now views of the shared memory
    pixels, labels = digits.images("training")
    apply = apply_together if options.synchronous else apply_alone
    shared.barrier.wait()  # otherwise the first finishes before the last starts
    shared.clock[worker, 0] = time.monotonic()
    for step in range(worker, len(shared.staleness), options.workers):
        read = int(shared.applied.sum())
        chosen = digits.batch(options, step)
        loss = cross_entropy(network(pixels[chosen]), labels[chosen])
        gradient = parameters_to_vector(torch.autograd.grad(loss, network.parameters()))
        apply(worker, step, read, options.lr * gradient, shared)
    shared.clock[worker, 1] = time.monotonic()


def apply_alone(worker: int, step: int, read: int, change: Tensor, shared: Shared) -> None:
    """Hogwild. Each worker has a counter, because a shared one would lose counts, too."""
    shared.staleness[step] = int(shared.applied.sum()) - read
    shared.weights.sub_(change)
    shared.tally.add_(1)
    shared.applied[worker] += 1


def apply_together(worker: int, step: int, read: int, change: Tensor, shared: Shared) -> None:
    """The baseline: the gradients of all workers are summed into one update."""
    shared.gradients[worker] = change
    shared.barrier.wait()
    shared.staleness[step] = int(shared.applied.sum()) - read
    shared.barrier.wait()
    if worker == 0:
        shared.weights.sub_(shared.gradients.sum(0))
        shared.tally.add_(len(shared.applied))
        shared.applied.add_(1)
    shared.barrier.wait()


def share(options: argparse.Namespace) -> Shared:
    """Allocate the shared memory, with the initial weights."""
    first = parameters_to_vector(digits.network(options).parameters()).detach()
    workers, steps = options.workers, digits.steps(options, options.workers)
    tensors = (
        first,
        torch.zeros_like(first),
        torch.zeros(workers, len(first)),
        torch.zeros(workers, dtype=torch.int64),
        torch.zeros(steps, dtype=torch.int64),
        torch.zeros(workers, 2, dtype=torch.float64),
    )
    barrier = multiprocessing.get_context("spawn").Barrier(workers)
    return Shared(*(tensor.share_memory_() for tensor in tensors), barrier)


def report(options: argparse.Namespace, shared: Shared) -> str:
    """Test accuracy, staleness, and the share of updates that were lost."""
    network = digits.network(options)
    vector_to_parameters(shared.weights, network.parameters())
    pixels, labels = digits.images("test")
    with torch.no_grad():
        result = digits.accuracy(network(pixels), labels)
    steps = len(shared.staleness)
    seconds = shared.clock[:, 1].max() - shared.clock[:, 0].min()
    rate = float(steps * options.batch_size / seconds)
    lost = 1 - shared.tally.double().mean().item() / steps
    mode = "hogwild, " + ("synchronous" if options.synchronous else "asynchronous")
    counts = Counter(shared.staleness.tolist())
    return f"{staleness.report(mode, result, rate, counts)}\nupdates lost {lost:.4%}"


def main() -> None:
    """Train with several processes, and print the report."""
    options = parse()
    shared = share(options)
    multiprocessing.spawn(work, args=(options, shared), nprocs=options.workers)
    print(report(options, shared), flush=True)


def parse() -> argparse.Namespace:
    """Parse the command line; exits if torchrun has started several processes."""
    parser = digits.parser(str(__doc__))
    parser.add_argument("--workers", type=int, default=2, help="processes on this node")
    options = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.exit("hogwild.py starts its own processes: use one node, one process, and --workers N")
    return options


if __name__ == "__main__":
    main()
