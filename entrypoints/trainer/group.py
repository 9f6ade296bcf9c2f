"""A process's place among the ranks: joining the group, agreeing, leaving."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass

import torch
from torch import distributed


@dataclass(frozen=True)
class Place:
    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this rank is the one that prints, writes metrics and saves."""
        return self.rank == 0


def join() -> Place:
    """Join the group that torchrun's variables describe; without them, a group of one."""
    device, backend = _device()
    alone = {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group(backend, **({} if "RANK" in os.environ else alone))
    return Place(distributed.get_rank(), distributed.get_world_size(), device)


def _device() -> tuple[torch.device, str]:
    """One GPU for each process where there are enough, else the CPU for all of them."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() < processes:
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device, "nccl"


def totals(place: Place, *values: float) -> list[float]:
    """Each value summed over the ranks, in double precision."""
    tensor = torch.tensor(values, dtype=torch.float64, device=place.device)
    distributed.all_reduce(tensor)
    return tensor.tolist()


def from_first(place: Place, value: object) -> object:
    """What rank 0 passed, on every rank."""
    box = [value]
    distributed.broadcast_object_list(box, src=0, device=place.device)
    return box[0]


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
