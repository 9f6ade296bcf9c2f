"""Hogwild: processes of one node change the same weights in shared memory, without any lock.

    python hogwild.py --workers 2
    deploykit submit --backend local --set entrypoint.script=hogwild.py \
        --set resources.processes_per_node=1

What "lock-free" means here. `weights -= lr * gradient` reads, subtracts and writes each element. If
two processes do it at once, an element can get both updates, or the second write replaces the
first, and that update is lost: silently, and not the same ones in the next run. A forward pass can
read some weights from before another's update and some from after it. No element is ever half
written: an aligned float is stored whole. So the weights stay numbers that some order of updates,
less the lost ones, could have produced; no seed brings the same ones back.

Niu et al., https://arxiv.org/abs/1106.5730, prove that this converges where each gradient touches
few of the weights. Here it touches nearly all, so the proof does not hold: it only works. `tally`,
as long as the weights and changed in the same way, shows what is lost.
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
    """What all processes see. Every tensor lies in shared memory."""

    weights: Tensor  # flat
    tally: Tensor  # as the weights; each update adds 1 to all of it
    gradients: Tensor  # [workers, weights], only for the synchronous mode
    applied: Tensor  # [workers], gradients applied; only the worker itself counts up its own
    staleness: Tensor  # [steps]
    clock: Tensor  # [workers, 2], seconds, start and end
    barrier: Barrier


def work(worker: int, options: argparse.Namespace, shared: Shared) -> None:
    torch.set_num_threads(1)
    network = digits.network(options)
    vector_to_parameters(shared.weights, network.parameters())  # now views of the shared memory
    pixels, labels = digits.images("training")
    apply = apply_together if options.synchronous else apply_alone
    shared.barrier.wait()  # else the first is done before the last has started
    shared.clock[worker, 0] = time.monotonic()
    for step in range(worker, len(shared.staleness), options.workers):
        read = int(shared.applied.sum())
        chosen = digits.batch(options, step)
        loss = cross_entropy(network(pixels[chosen]), labels[chosen])
        gradient = parameters_to_vector(torch.autograd.grad(loss, network.parameters()))
        apply(worker, step, read, options.lr * gradient, shared)
    shared.clock[worker, 1] = time.monotonic()


def apply_alone(worker: int, step: int, read: int, change: Tensor, shared: Shared) -> None:
    """Hogwild. A counter for each worker, since one for all would lose counts in the same way."""
    shared.staleness[step] = int(shared.applied.sum()) - read
    shared.weights.sub_(change)
    shared.tally.add_(1)
    shared.applied[worker] += 1


def apply_together(worker: int, step: int, read: int, change: Tensor, shared: Shared) -> None:
    """The baseline: all gradients of a round are summed into one update."""
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
    """Everything in shared memory, with the first weights."""
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
    options = parse()
    shared = share(options)
    multiprocessing.spawn(work, args=(options, shared), nprocs=options.workers)
    print(report(options, shared), flush=True)


def parse() -> argparse.Namespace:
    parser = digits.parser(str(__doc__))
    parser.add_argument("--workers", type=int, default=2, help="processes, all on this node")
    options = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.exit("Hogwild starts its processes itself: one node, one process, and --workers N")
    return options


if __name__ == "__main__":
    main()
