"""A process's place among the ranks: joining the group, adding up, agreeing, leaving."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Place:
    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this rank is the one that prints and writes metrics."""
        return self.rank == 0

    @property
    def first_of_node(self) -> bool:
        return os.environ.get("LOCAL_RANK", "0") == "0"

    @property
    def ranks_of_node(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world))

    def mesh(self, **sizes: int) -> DeviceMesh:
        """The ranks as a grid with one named axis for each of `sizes`, the last varying fastest."""
        return init_device_mesh(
            self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )

    def say(self, text: str) -> None:
        """Print once for the whole job."""
        if self.first:
            print(text, flush=True)


def join() -> Place:
    """Join the group that torchrun's variables describe; without them, a group of one."""
    device, backend = _device()
    alone = {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group(backend, **(_meeting() if "RANK" in os.environ else alone))
    return Place(distributed.get_rank(), distributed.get_world_size(), device)


def _meeting() -> dict[str, Any]:
    """Where the ranks meet: as torchrun says, apart from what an earlier attempt left there.

    torchrun's store lives on when it starts its workers again, and with gloo (torch 2.13) the new
    ones find the addresses of the dead. Each node counts its restarts for itself, so only
    on one node does the count tell the attempts apart; `launch.py` has the cure for several.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return {}
    store, rank, world = next(distributed.rendezvous("env://"))
    return {"store": PrefixStore(f"attempt-{attempt}", store), "rank": rank, "world_size": world}


def _device() -> tuple[torch.device, str]:
    """One GPU for each process where there are enough, else the CPU for all of them."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() < processes:
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device, "nccl"


def totals(place: Place, values: Sequence[float]) -> list[float]:
    """Each value summed over the ranks, in double precision."""
    tensor = torch.tensor(values, dtype=torch.float64, device=place.device)
    distributed.all_reduce(tensor)
    return tensor.tolist()


def from_first(place: Place, value: Any) -> Any:
    """What rank 0 passed, on every rank."""
    box = [value]
    distributed.broadcast_object_list(box, src=0, device=place.device)
    return box[0]


def fitting(number: int) -> str:
    """The sizes of equal parts into which `number` can be cut, for a message."""
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)


PERIOD = 0.1
"""Seconds between two questions, where steps are shorter than that ..."""
MOST = 100
"""... and steps between them at most."""


class Vote:
    """Whether any rank has been told to stop, known to all of them at the same step.

    The question goes out before a step's work and its answer is read after it, over gloo and a
    group of its own: it hides behind the work, never waits for a GPU, and mixes with nothing. With
    it goes the length of a step on the slowest rank, from which all know when to ask next. At first
    none is known, so all ask again at the second step.
    """

    def __init__(self, notices: Sequence[int]) -> None:
        self._notices = notices
        self._group = distributed.new_group(backend="gloo")
        self._flag = torch.zeros(2, dtype=torch.float64)
        self._work: distributed.Work | None = None
        self._steps, self._left = 1, 1
        self._asked: float | None = None

    def ask(self) -> None:
        """Every rank calls this once before each step."""
        self._left -= 1
        if self._left:
            return
        now = time.monotonic()
        seconds = PERIOD if self._asked is None else (now - self._asked) / self._steps
        told = float(bool(self._notices))
        self._flag.copy_(torch.tensor([told, seconds], dtype=torch.float64))
        self._asked = now
        self._work = distributed.all_reduce(
            self._flag, distributed.ReduceOp.MAX, group=self._group, async_op=True
        )

    def stop(self) -> bool:
        """The answer to the question asked before this step, if any, the same on every rank."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        told, seconds = self._flag.tolist()
        self._steps = self._left = max(1, int(PERIOD / max(seconds, PERIOD / MOST)))
        return bool(told)


def leave() -> None:
    """Leave the group after success, once the model and the optimizer are out of use.

    A gloo thread that still frees a piece of them while Python shuts down aborts the process, so
    they are collected first. After a failure nobody leaves: other ranks may be waiting inside a
    collective, and leaving would wait for them.
    """
    gc.collect()
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
