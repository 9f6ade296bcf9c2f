"""The ranks of the preflight test's process group on one node, each forked from this process.

    launch.py --preflight-ranks SOCKET

A rank prints its versions, and reads orders from its stdin, each a line of JSON: to join the group
and run an all_reduce, then to measure its bandwidth. Lines that begin with ``preflight`` are for
the launcher; NCCL prints to the same place. One more process of the first node keeps the store
through which the ranks find each other, so that they can be ended and tried again.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore

from deploykit_node.network.elastic import listening_store
from deploykit_node.preflight import group, speeds
from deploykit_node.preflight.peers import Record

_COUNT = 1 << 18
_MULTIPLIED = 8
"""Matrix products, the first of which loads libraries."""
_SMALL = 1 << 13
"""Bytes of the small all_reduce: what a barrier or a norm of gradients sends, and some more."""
_TIMES = 4
"""All_reduces of each size, the first of which connects; the best one counts."""
_SECONDS = 0.1
"""How long a large all_reduce may take, which decides its size."""
_MOST = {"gloo": 1 << 24, "nccl": 1 << 28}
"""Most bytes of a large one."""


def main(argv: Sequence[str]) -> None:
    """Fork the ranks that the launcher asks for."""
    group.serve(int(argv[0]), _take_part)


def _take_part(request: Record) -> None:
    """Keep the store, or be a rank."""
    if "store" in request:
        store = listening_store(request["store"])
        _report({"port": store.port})
        signal.pause()
    local_rank = request["local_rank"]
    gpu = local_rank if torch.cuda.device_count() >= request["processes"] else None
    versions = {"torch": torch.__version__, "NCCL": _nccl()}
    _report({**versions, "backend": "gloo" if gpu is None else "nccl", **_multiply(gpu)})
    for line in sys.stdin:
        order = json.loads(line)
        _report(_measure(order) if "rounds" in order else _reduce(order, request["rank"], gpu))


def _reduce(order: Record, rank: int, gpu: int | None) -> Record:
    """Join the group and sum one mebibyte of ones."""
    begun, world = time.monotonic(), order["world"]
    patience = timedelta(seconds=order["seconds"])
    store = TCPStore(order["address"], order["port"], timeout=patience)
    backend = "gloo" if gpu is None else order["backend"] or "nccl"
    if gpu is not None:
        torch.cuda.set_device(gpu)
    distributed.init_process_group(
        backend,
        store=PrefixStore(order["name"], store),
        rank=rank,
        world_size=world,
        timeout=patience,
    )
    ones = torch.ones(_COUNT, device=_device())
    distributed.all_reduce(ones)
    correct = bool((ones == world).all())
    distributed.barrier()
    return {"backend": backend, "correct": correct, "seconds": time.monotonic() - begun}


def _device() -> str:
    if distributed.get_backend() != "nccl":
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def _measure(order: Record) -> Record:
    """Bus bandwidth of the whole group, small and large, and with one other node in each round.

    ``rounds`` are the other nodes, or None; ``processes`` is the number of ranks of a node.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    processes = order["processes"]
    waited, begun = speeds.waited(), time.perf_counter()
    small, _ = _bus_bandwidth(_SMALL, None, world)
    size = _large()
    large, _ = _bus_bandwidth(size, None, world)
    node, pairs = rank // processes, {}
    for other in order["rounds"]:
        nodes = sorted({node, node if other is None else other})
        ranks = [n * processes + local for n in nodes for local in range(processes)]
        # also where there is no other: PyTorch names a group after the number of earlier ones
        nodes_group = distributed.new_group(ranks, use_local_synchronization=True)
        if other is not None:
            pairs[str(other)], _ = _bus_bandwidth(size, nodes_group, len(ranks))
    busy = (speeds.waited() - waited) / (time.perf_counter() - begun)
    distributed.barrier()
    return {"small": small, "large": large, "size": size, "pairs": pairs, "busy": busy}


def _bus_bandwidth(
    size: int, of: distributed.ProcessGroup | None, ranks: int
) -> tuple[float, float]:
    """Bytes per second of the best all_reduce of `size` bytes as bus bandwidth, and its seconds."""
    ones, best = torch.ones(size // 4, device=_device()), math.inf
    for _ in range(_TIMES):
        begun = time.perf_counter()
        distributed.all_reduce(ones, group=of)
        if ones.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return speeds.bus(size, best, ranks), best


def _large() -> int:
    """Bytes of a large all_reduce, by the time that the slowest rank needs for a mebibyte."""
    _, seconds = _bus_bandwidth(1 << 20, None, distributed.get_world_size())
    slowest = torch.tensor(seconds, device=_device())
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    size, most = 1 << 20, _MOST[distributed.get_backend()]
    while size < most and size / (1 << 20) * float(slowest) * 2 < _SECONDS:
        size *= 2
    return size


def _multiply(gpu: int | None) -> Record:
    """Whether this rank's device multiplies correctly, and its best speed in FLOP/s.

    Sums of ones are exact in these types.
    """
    device, size = ("cpu", 256) if gpu is None else (f"cuda:{gpu}", 8192)
    kind = torch.float32 if gpu is None else torch.bfloat16
    ones, best = torch.ones(size, size, device=device, dtype=kind), math.inf
    for _ in range(_MULTIPLIED):
        begun = time.perf_counter()
        product = ones @ ones
        if gpu is not None:
            torch.cuda.synchronize(gpu)
        best = min(best, time.perf_counter() - begun)
    name = "CPU matrix multiplication" if gpu is None else f"GPU {gpu} matrix multiplication"
    return {"device": name, "speed": 2 * size**3 / best, "correct": bool((product == size).all())}


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _report(record: Record) -> None:
    print(group.MARK + json.dumps(record), flush=True)
