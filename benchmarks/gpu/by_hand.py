"""The hand-written loop beside which `make gpu` sets the trainer's: DDP, the same model and data.

Prints one line of JSON on rank 0: ``{"tokens_per_second": median}``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))

from trainer import arguments, tasks


def main(words: list[str]) -> None:
    """Train as the options of the trainer say, in bf16."""
    options, rank = arguments.parse(words), int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(options.seed)
    task = tasks.load(options)
    network = task.model().to(device)
    for block in network.blocks if options.compile else ():
        block.compile()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    world = int(os.environ["WORLD_SIZE"])
    size = options.batch_size // world
    rates = []
    for step in range(options.steps):
        first = (step * world + rank) * size
        samples = [task.training[n % len(task.training)] for n in range(first, first + size)]
        inputs, targets = (torch.stack(part).to(device) for part in zip(*samples, strict=True))
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            scores = model(inputs)
            loss = cross_entropy(scores.flatten(0, -2).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        rates.append(world * targets.numel() / (time.perf_counter() - started))
    if rank == 0:
        late = rates[len(rates) // 2 :]
        print(json.dumps({"tokens_per_second": statistics.median(late)}), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
