"""Two ranks that are slow for a good reason: `healthy.py KIND SECONDS`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def computes(seconds: float) -> None:
    """Compute without a word: an evaluation, a first step that compiles, a large epoch."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.randn(200, 200) @ torch.randn(200, 200)


def evaluation(seconds: float) -> None:
    """Rank 0 evaluates, the other one waits."""
    print("step 1", flush=True)
    if dist.get_rank() == 0:
        computes(seconds)


def checkpoint(seconds: float) -> None:
    """Rank 0 writes a file slowly."""
    print("step 1", flush=True)
    end = time.monotonic() + seconds
    with Path(os.environ["DEPLOYKIT_OUTPUT_DIR"], "checkpoint").open("wb") as file:
        while dist.get_rank() == 0 and time.monotonic() < end:
            file.seek(0)
            file.write(bytes(1 << 21))
            time.sleep(0.2)


def compilation(seconds: float) -> None:
    """The first step takes long; there was no output before."""
    computes(seconds)


def epochs(seconds: float) -> None:
    """A line for each epoch, and each takes longer than the one before."""
    for share in (0.3, 0.6, 1.0):
        print(f"epoch of {share * seconds:.0f} s", flush=True)
        time.sleep(share * seconds)


def downloads(seconds: float) -> None:
    """Rank 0 fetches data in the beginning and says so now and then."""
    for _ in range(4):
        if dist.get_rank() == 0:
            print("downloading", flush=True)
            time.sleep(seconds / 4)


dist.init_process_group("gloo")
globals()[sys.argv[1]](float(sys.argv[2]))
dist.all_reduce(torch.ones(1))
print("step 2", flush=True)
dist.barrier()  # a rank that ends early may abort the other one
dist.destroy_process_group()
