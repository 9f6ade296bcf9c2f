"""The process group of the job: how ranks join it, exchange values, and leave it."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed.nn.functional  # before init_process_group: see `join`
from torch import Tensor, distributed
from torch.distributed import HashStore, PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.errors import ConfigError

_failed: list[int] = []
"""The exit code of an error, once there was one."""


@dataclass(frozen=True)
class DistributedContext:
    """The rank of this process, the number of ranks, and the device that it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank prints and writes metrics."""
        return self.rank == 0

    @property
    def is_local_rank_zero(self) -> bool:
        """Whether this is the first rank on its node."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    def mesh(self, **sizes: int) -> DeviceMesh:
        """Arrange all ranks in a mesh with one named axis per size; the last varies fastest."""
        return init_device_mesh(
            self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )

    def log(self, text: str) -> None:
        """Print a line on rank 0 only."""
        if self.is_rank_zero:
            print(text, flush=True)


def join() -> DistributedContext:
    """Join the group that torchrun's variables describe, or a group of one without them.

    Uses NCCL with one GPU per rank where the node has enough GPUs, otherwise gloo on the CPU.

    `torch.distributed.nn.functional`, which DDP imports, keeps the group that exists when it is
    first imported (2.13): threads of gloo would then outlive the run, and may abort it at its end.
    """
    atexit.register(_end_after_error)  # the last of the exit handlers, as the first registered
    device, backend = _device()
    single = {"store": HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group(backend, **(_rendezvous() if "RANK" in os.environ else single))
    return DistributedContext(distributed.get_rank(), distributed.get_world_size(), device)


def alone() -> DistributedContext:
    """The context of one process that computes without a group."""
    return DistributedContext(0, 1, _device()[0])


def _rendezvous() -> dict[str, Any]:
    """Arguments of `init_process_group` that keep a restart apart from the attempt before it.

    torchrun's store outlives the workers that it restarts, and with gloo (torch 2.13) the new ones
    read the addresses of the dead ones from it. A prefix per restart prevents that. Each node
    counts its own restarts, so the count identifies an attempt only on a single node; `launch.py`
    has the remedy for several.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restart == "0" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return {}
    store, rank, world_size = next(distributed.rendezvous("env://"))
    store = PrefixStore(f"attempt-{restart}", store)
    return {"store": store, "rank": rank, "world_size": world_size}


def _device() -> tuple[torch.device, str]:
    """The device of this rank and the backend of the process group."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() < processes:
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device, "nccl"


def sum_over_ranks(context: DistributedContext, values: Sequence[float]) -> list[float]:
    """Sum each value over the ranks, in double precision. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=context.device)
    distributed.all_reduce(tensor)
    sums: list[float] = tensor.tolist()
    return sums


def gather(context: DistributedContext, tensor: Tensor) -> Tensor:
    """The tensors of all ranks, of equal shape, stacked in a new first dimension. Collective."""
    own = tensor.to(context.device)
    parts = [torch.empty_like(own) for _ in range(context.world_size)]
    distributed.all_gather(parts, own)
    return torch.stack(parts)


def broadcast_from_rank_zero(context: DistributedContext, value: Any) -> Any:
    """Return rank 0's `value` on every rank; it is pickled on the way. Collective."""
    values = [value]
    distributed.broadcast_object_list(values, src=0, device=context.device)
    return values[0]


def refuse_together(problem: str) -> None:
    """Raise ConfigError, on every rank, with the first `problem` of any rank. Collective."""
    problems = [problem] * distributed.get_world_size()
    distributed.all_gather_object(problems, problem)
    if any(problems):
        raise ConfigError(next(filter(None, problems)))


def divisors(number: int) -> str:
    """The divisors of `number`, comma-separated, for error messages."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def leave() -> None:
    """Destroy the process group after a successful run.

    The caller drops its references to model and optimizer first. They are collected here: a gloo
    thread that still frees one of their tensors while Python shuts down aborts the process. Do not
    call this after an error: other ranks may be inside a collective, and this would wait for them.
    """
    gc.collect()
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()


def fail(code: int) -> NoReturn:
    """Exit with `code` after an error, without leaving the group.

    Python finishes a background save and runs its exit handlers, but frees nothing: threads of gloo
    that outlive Python can abort the process, and `code` would be lost.
    """
    _failed.append(code)
    sys.exit(code)


def _end_after_error() -> None:
    if _failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_failed[0])
