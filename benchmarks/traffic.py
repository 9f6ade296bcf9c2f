"""Communication volume of each strategy per step, from the collectives and from the network.

Four ranks with gloo. The collectives of a step come from torch's flight recorder. Next to them are
the bytes on a loopback interface of the benchmark's own network namespace (`unshare --net` requires
root; without it that column is empty, because other programs use the shared interface). Both are in
units of P, the bytes of the model's parameters in single precision. `gloo` is what the collectives
should send with ring algorithms, `NCCL` what the strategy sends with NCCL: gloo implements
reduce-scatter with an all-reduce (torch 2.13), NCCL does not.

Over n ranks an all-gather, a reduce-scatter or a broadcast of P bytes sends (n - 1) / n of P from
each rank, and an all-reduce twice that:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
`make bench` runs this file; it exits with code 1 if the network carried another volume.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed
from torch._C._distributed_c10d import _dump_fr_trace
from torch.distributed import distributed_c10d

_ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"
sys.path.insert(0, str(_ENTRYPOINTS))

from trainer import arguments, tasks  # noqa: E402
from trainer.data import Batch, BatchLoader  # noqa: E402
from trainer.optim import optimizers  # noqa: E402
from trainer.parallel import process_group  # noqa: E402
from trainer.parallel.layout import Layout  # noqa: E402
from trainer.parallel.strategy import Strategy  # noqa: E402
from trainer.setup import Setup  # noqa: E402

RANKS, STEPS = 4, 4
SIZE = {"Float": 4, "Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Int": 4}
MODEL = "--task text --layers 4 --width 192 --heads 4 --sequence 32 --batch-size 16"
SENT = {"all_reduce": 2, "all_gather": 1, "broadcast": 1}
"""Bytes that a ring algorithm sends, in units of (n - 1) / n of an operation's bytes."""
CLOSE = 0.05
"""Allowed relative difference between the bytes on the network and the rule: TCP headers and
acknowledgements, which matter more for small messages, and the messages that NOISE leaves out."""
NOISE = 0.001
"""Collectives that send less than this share of P are left out."""

_SHARE = (RANKS - 1) / RANKS
NCCL = {
    "ddp": 2 * _SHARE,
    "manual": 2 * _SHARE,
    "zero1": 3 * _SHARE,
    "zero2": 2 * _SHARE,
    "zero3": 3 * _SHARE,
    "hsdp --shard-ranks 2": 3 / 2 + 2 / 2 / 2,
    "tp": None,
}
"""In units of P. DDP: an all-reduce of the gradients. ZeRO 1: also a broadcast of the parameters.
ZeRO 2 and 3: a reduce-scatter of the gradients and one or two all-gathers of the parameters. HSDP:
these within groups of two, and an all-reduce of half of the gradients between the groups. `tp`
sends activations instead."""


class Pattern(NamedTuple):
    """The communication of one rank in a step, in units of P."""

    collectives: list[tuple[str, int, float, float]]
    """Operation, ranks in its group, number of calls, and bytes."""
    carried: float | None
    """Bytes on the network per rank, if they could be measured."""

    @property
    def rule(self) -> float:
        """What the collectives should send with ring algorithms."""
        return sum(
            SENT[name] * (ranks - 1) / ranks * size for name, ranks, _, size in self.collectives
        )

    @property
    def met(self) -> bool:
        """Whether the network carried what the rule says, as far as it was measured."""
        return self.carried is None or abs(self.carried - self.rule) <= CLOSE * self.rule


def recorded() -> Iterator[tuple[str, int, int]]:
    """Operation, number of ranks and bytes of each collective of this rank so far."""
    sizes = {name: each.size() for each, name in distributed_c10d._world.pg_names.items()}  # noqa: SLF001
    for entry in pickle.loads(_dump_fr_trace())["entries"]:
        operation = entry["profiling_name"].removeprefix("gloo:")
        outputs = zip(entry["output_sizes"], entry["output_dtypes"], strict=True)
        size = sum(math.prod(shape) * SIZE[kind] for shape, kind in outputs)
        yield operation, sizes[entry["process_group"][0]], size


def crossed() -> int:
    """Bytes that have been received on the loopback interface."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def work(words: str) -> None:
    """Measure on this rank; rank 0 prints the pattern as its last line."""
    torch.set_num_threads(1)
    chosen = arguments.parse([*MODEL.split(), "--strategy", *words.split()])
    context = process_group.join()
    task, layout = tasks.load(chosen), Layout(chosen, context)
    unit = 4 * STEPS * sum(each.numel() for each in task.model().parameters())
    data, shard = task.training, layout.data_shard
    batch = next(BatchLoader(task, data, chosen.batch_size, shard, context).in_order())
    setup = Setup(layout, task, batch)
    strategy = Strategy(setup, partial(optimizers.create, chosen))
    step(strategy, batch)  # DDP rebuilds its buckets after the first
    distributed.barrier()
    before, carried = len([*recorded()]), crossed()
    for _ in range(STEPS):
        step(strategy, batch)
    distributed.barrier()
    carried = crossed() - carried
    calls: Counter[tuple[str, int]] = Counter()
    sizes: Counter[tuple[str, int]] = Counter()
    for *key, size in [*recorded()][before:]:
        calls[tuple(key)] += 1
        sizes[tuple(key)] += size
    made = [
        (*key, calls[key] / STEPS, size / unit)
        for key, size in sorted(sizes.items())
        if size > NOISE * unit
    ]
    context.log(json.dumps([made, carried / RANKS / unit]))
    del strategy, setup
    process_group.leave()


def step(strategy: Strategy, batch: Batch) -> None:
    """Train one step."""
    strategy.backward(batch)
    strategy.step()


def measure(words: str, *, alone: bool) -> Pattern:
    """Start the ranks, if `alone` in a network namespace of their own, and return the pattern."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    argv = [sys.executable, *torchrun, __file__, "--rank", words]
    namespace = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    done = subprocess.run(
        [*namespace, *argv] if alone else argv,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "20000"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    made, carried = json.loads(done.stdout.splitlines()[-1])
    return Pattern([tuple(each) for each in made], carried if alone else None)


def rows(patterns: Mapping[str, Pattern]) -> Iterator[str]:
    """The lines of the table."""
    line = "{:<22}{:>9}{:>7}{:>7}{:>6}  {}".format
    yield line(
        "strategy", "measured", "gloo", "NCCL", "met", "collectives of a step: bytes (calls)"
    )
    for words, pattern in patterns.items():
        carried = "" if pattern.carried is None else f"{pattern.carried:.2f}"
        nccl = "" if NCCL[words] is None else f"{NCCL[words]:.2f}"
        made = ", ".join(
            f"{name} over {ranks}: {size:.2f} ({calls:.0f})"
            for name, ranks, calls, size in pattern.collectives
        )
        yield line(words, carried, f"{pattern.rule:.2f}", nccl, ("NO", "yes")[pattern.met], made)


def main() -> int:
    """Measure, print, and return 1 if the network carried another volume."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        work(args.rank)
        return 0
    alone = os.geteuid() == 0 and shutil.which("unshare") is not None
    patterns = {words: measure(words, alone=alone) for words in NCCL}
    print("\n".join(rows(patterns)))
    return 0 if all(pattern.met for pattern in patterns.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
