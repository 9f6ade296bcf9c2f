"""A pipeline that is never flushed: PipeDream's 1F1B with weight stashing.

    torchrun --standalone --nproc-per-node=2 weight_stashing.py
    deploykit submit --backend local --set entrypoint.script=weight_stashing.py \
        --set resources.processes_per_node=2

Each rank is a stage and holds some blocks of the network. Once the pipeline is full, a stage
alternates between forward and backward passes, and updates its weights after each backward pass.
Between the forward and the backward pass of a batch, stage s of S applies S - 1 - s updates from
other batches. If the backward pass used different weights than the forward pass, its result would
not be the gradient of any function. Each forward pass therefore stashes its weights for the
backward pass (Narayanan et al., https://arxiv.org/abs/1806.03377). A batch still sees a different
version of the weights in each stage. "Vertical sync", which prevents that, is left out, as in the
paper's experiments.

--no-stash shows why the stash is needed: it counts backward passes that use different weights.
--synchronous flushes the pipeline after every --group batches and sums their gradients into one
update. Then nothing is stale and no stash is needed, but stages wait for each other.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import digits
import staleness
import torch
from torch import Tensor, distributed
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector


class Flight(NamedTuple):
    """A batch between its forward and its backward pass on this stage."""

    read: int  # version of the weights
    weights: dict[str, Tensor]  # those in the autograd graph
    witness: Tensor  # a copy of their values in the forward pass, for the check
    inputs: Tensor
    outputs: Tensor


class Results(NamedTuple):
    """The statistics of a stage."""

    updates: int
    staleness: Counter[int]
    in_flight: int  # maximum number of batches at once, each with its stash
    foreign: int  # backward passes with other weights than their forward pass
    test: tuple[float, float]  # accuracy and loss; 0 except on the last stage
    rate: float  # samples per second


class Stage:
    """The blocks of one rank, their weights, and the batches in flight."""

    def __init__(self, options: argparse.Namespace, rank: int, world: int) -> None:
        self.options, self.rank, self.last = options, rank, world - 1
        network = digits.network(options)
        bounds = [digits.BLOCKS * stage // world for stage in (rank, rank + 1)]
        self.blocks = network[slice(*bounds)]
        self.pixels, self.labels = digits.images("training")
        self.version = self.in_flight = self.foreign = 0
        self.flying: dict[int, Flight] = {}
        self.reads: list[int] = []  # versions of the gradients in the next update
        self.staleness: Counter[int] = Counter()
        self.sent: dict[int, tuple[distributed.Work, Tensor]] = {}

    def forward(self, step: int) -> None:
        """Run the forward pass of a batch, and keep the weights that it uses."""
        chosen = digits.batch(self.options, step)
        inputs = self.pixels[chosen] if self.rank == 0 else self.receive(len(chosen), self.rank - 1)
        weights = dict(self.blocks.named_parameters())
        if not (self.options.no_stash or self.options.synchronous):
            weights = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        outputs = functional_call(self.blocks, weights, inputs.requires_grad_())
        if self.rank == self.last:
            outputs = cross_entropy(outputs, self.labels[chosen])
        else:
            self.send(outputs.detach(), self.rank + 1)
        witness = parameters_to_vector(weights.values()).detach().clone()
        self.flying[step] = Flight(self.version, weights, witness, inputs, outputs)
        self.in_flight = max(self.in_flight, len(self.flying))

    def backward(self, step: int) -> None:
        """Run the backward pass of a batch with the weights of its forward pass."""
        flight = self.flying.pop(step)
        same = torch.equal(parameters_to_vector(flight.weights.values()), flight.witness)
        self.foreign += not same
        if not (same or self.options.no_stash):
            raise AssertionError(f"stage {self.rank}, batch {step}: not the forward weights")
        last = self.rank == self.last
        gradient = None if last else self.receive(len(flight.outputs), self.rank + 1)
        read = [flight.inputs, *flight.weights.values()]
        for_inputs, *gradients = torch.autograd.grad(flight.outputs, read, gradient)
        if self.rank:
            self.send(for_inputs, self.rank - 1)
        for weight, each in zip(self.blocks.parameters(), gradients, strict=True):
            weight.grad = each if weight.grad is None else weight.grad + each
        self.reads.append(flight.read)

    def update(self) -> None:
        """Apply the accumulated gradients as one update."""
        self.staleness.update(self.version - read for read in self.reads)
        for weight in self.blocks.parameters():
            # .data bypasses autograd, which would refuse what --no-stash shows
            weight.data -= self.options.lr * weight.grad
            weight.grad = None
        self.reads.clear()
        self.version += 1

    def run(self, steps: Sequence[int], *, flush: bool) -> None:
        """1F1B over `steps`, after as many forward passes as there are later stages."""
        ahead = iter(steps)
        for _, step in zip(range(self.last - self.rank), ahead, strict=False):
            self.forward(step)
        for step in steps:
            for following in (each for _, each in zip("1", ahead, strict=False)):
                self.forward(following)
            self.backward(step)
            if not flush:
                self.update()
        if flush:
            self.update()

    def receive(self, images: int, rank: int) -> Tensor:
        """Receive activations or gradients (images, WIDTH) from another stage."""
        tensor = torch.empty(images, digits.WIDTH)
        distributed.recv(tensor, rank)
        return tensor

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send without waiting, because the other stage may be sending to this one."""
        if rank in self.sent:
            self.sent[rank][0].wait()
        tensor = tensor.contiguous()
        self.sent[rank] = distributed.isend(tensor, rank), tensor

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Accuracy and loss on the test images; 0 except on the last stage."""
        pixels, labels = digits.images("test")
        inputs = pixels if self.rank == 0 else self.receive(len(labels), self.rank - 1)
        outputs = self.blocks(inputs)
        if self.rank == self.last:
            return digits.accuracy(outputs, labels)
        self.send(outputs, self.rank + 1)
        return 0.0, 0.0


def train(stage: Stage) -> Results:
    """Run all batches through the pipeline, and evaluate."""
    options = stage.options
    steps = range(digits.steps(options, options.group))
    distributed.barrier()
    began = time.monotonic()
    if options.synchronous:
        for first in steps[:: options.group]:
            stage.run(steps[first : first + options.group], flush=True)
    else:
        stage.run(steps, flush=False)
    distributed.barrier()
    rate = len(steps) * options.batch_size / (time.monotonic() - began)
    result = stage.test()
    for sending, _ in stage.sent.values():
        sending.wait()  # otherwise its tensor may be freed while it is sent
    return Results(stage.version, stage.staleness, stage.in_flight, stage.foreign, result, rate)


def report(options: argparse.Namespace, stages: Sequence[Results]) -> str:
    """A table with one line per stage, between headline and summary."""
    mode = "synchronous" if options.synchronous else "asynchronous"
    mode = f"pipeline of {len(stages)} stages, {mode}{', no stash' * options.no_stash}"
    lines = [staleness.headline(mode, stages[-1].test, stages[0].rate)]
    lines.append("stage  updates  staleness mean  max  in flight  backward with other weights")
    for rank, stage in enumerate(stages):
        stale = f"{staleness.mean(stage.staleness):14.2f}  {max(stage.staleness):3}"
        counts = f"{stage.in_flight:9}  {stage.foreign:27}"
        lines.append(f"{rank:5}  {stage.updates:7}  {stale}  {counts}")
    gradients = sum((stage.staleness for stage in stages), Counter())
    return "\n".join([*lines, staleness.summary(gradients)])


def main() -> None:
    """Be the stage of this rank; rank 0 prints the report."""
    options = parse()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if not 1 < world <= digits.BLOCKS:
        sys.exit(f"requires 2 to {digits.BLOCKS} stages, not {world}: torchrun --nproc-per-node=2")
    distributed.init_process_group("gloo")
    results = train(Stage(options, distributed.get_rank(), world))
    everyone = [results] * world
    distributed.all_gather_object(everyone, results)
    if distributed.get_rank() == 0:
        print(report(options, everyone), flush=True)
    gc.collect()  # a gloo thread that frees tensors while Python shuts down aborts the process
    distributed.destroy_process_group()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = digits.parser(str(__doc__))
    parser.add_argument(
        "--group", type=int, default=2, metavar="BATCHES", help="batches per update"
    )
    parser.add_argument("--no-stash", action="store_true", help="do not stash weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
