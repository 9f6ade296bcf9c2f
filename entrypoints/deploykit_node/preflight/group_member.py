"""One rank of the preflight test's process group, in a process of its own.

    launch.py --preflight-rank RANK LOCAL_RANK LOCAL_WORLD_SIZE STORE_ADDRESS

It prints its versions, waits for an order on stdin, runs one all_reduce, and exits. Lines that
begin with ``preflight`` are for the parent; NCCL prints to the same pipe. The order is one line of
JSON: address and port of the store, which rank 0 holds, the number of ranks, and the seconds within
which they must finish.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore

from deploykit_node.network.elastic import listening_store
from deploykit_node.preflight.messages import MARK

_COUNT = 1 << 18
_MULTIPLIED = 8
"""Matrix products, the first of which loads libraries."""


def main(argv: Sequence[str]) -> None:
    """Take part in the group as the rank that `argv` names. Does not return."""
    rank, local_rank, processes = map(int, argv[:3])
    gpu = torch.cuda.device_count() >= processes
    # a separate store: below torchrun, init_process_group would look for the agent's
    store = listening_store(argv[3]) if not rank else None
    versions = {"torch": torch.__version__, "NCCL": _nccl(), "backend": "nccl" if gpu else "gloo"}
    multiplied = _multiply(local_rank if gpu else None)
    _report({**versions, "port": store.port if store else None, **multiplied})
    line = sys.stdin.readline()
    if line:
        _report(_reduce(json.loads(line), store, rank, local_rank if gpu else None))
    sys.stdout.flush()
    os._exit(0)  # destroying the group can wait for a rank that hangs


def _reduce(
    order: dict[str, Any], store: TCPStore | None, rank: int, gpu: int | None
) -> dict[str, Any]:
    """Join the group and sum one mebibyte of ones."""
    begun, world = time.monotonic(), order["world"]
    patience = timedelta(seconds=order["seconds"])
    store = store or TCPStore(order["address"], order["port"], timeout=patience)
    backend, device = ("gloo", "cpu") if gpu is None else ("nccl", f"cuda:{gpu}")
    if gpu is not None:
        torch.cuda.set_device(gpu)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=patience
    )
    ones = torch.ones(_COUNT, device=device)
    distributed.all_reduce(ones)
    correct = bool((ones == world).all())
    distributed.barrier()  # rank 0 holds the store
    return {"backend": backend, "correct": correct, "seconds": time.monotonic() - begun}


def _multiply(gpu: int | None) -> dict[str, Any]:
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
    name = "CPU, multiplying" if gpu is None else f"GPU {gpu}, multiplying"
    return {"device": name, "speed": 2 * size**3 / best, "correct": bool((product == size).all())}


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _report(record: dict[str, Any]) -> None:
    print(MARK + json.dumps(record), flush=True)
