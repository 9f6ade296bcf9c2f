"""One rank of a small process group: says its versions, waits for an order, adds up, ends.

    python preflight_group.py RANK LOCAL_RANK PROCESSES_ON_THIS_NODE ADDRESS_OF_NODE_0

Lines that begin with ``preflight`` are for the parent; NCCL prints to the same place. The order is
one line of JSON: address and port of the store, which rank 0 holds, the number of ranks, and the
seconds within which they must be done.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore

from elastic import listening_store

MARK = "preflight "
_COUNT = 1 << 18


def main() -> None:
    rank, local, processes = map(int, sys.argv[1:4])
    gpu = torch.cuda.device_count() >= processes
    # a store of its own: below torchrun, init_process_group would look for the agent's
    store = listening_store(sys.argv[4]) if not rank else None
    versions = {"torch": torch.__version__, "NCCL": _nccl(), "backend": "nccl" if gpu else "gloo"}
    _say({**versions, "port": store.port if store else None})
    line = sys.stdin.readline()
    if line:
        _say(_reduce(json.loads(line), store, rank, local if gpu else None))
    sys.stdout.flush()
    os._exit(0)  # leaving a group in good order can wait for a rank that hangs


def _reduce(
    order: dict[str, Any], store: TCPStore | None, rank: int, gpu: int | None
) -> dict[str, Any]:
    """Join the group and add up one mebibyte of ones."""
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
    right = bool((ones == world).all())
    distributed.barrier()  # rank 0 holds the store
    return {"backend": backend, "right": right, "seconds": time.monotonic() - begun}


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _say(record: dict[str, Any]) -> None:
    print(MARK + json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
