"""The hand-written loop beside which `make gpu` sets the trainer's: DDP, the same model and data.

Prints one line of JSON on rank 0: ``{"tokens_per_second": median}``.
"""

from __future__ import annotations

import gc
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
from trainer.train_options import TrainOptions


def main(words: list[str]) -> None:
    """Train as the options of the trainer say, in bf16."""
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rates = _rates(arguments.parse(words))
    if distributed.get_rank() == 0:
        late = rates[len(rates) // 2 :]
        print(json.dumps({"tokens_per_second": statistics.median(late)}), flush=True)
    gc.collect()  # DDP, freed after the group, would free it with the GIL, for which gloo may wait
    distributed.destroy_process_group()


def _rates(options: TrainOptions) -> list[float]:
    """Tokens a second of each step."""
    rank, world = int(os.environ["LOCAL_RANK"]), distributed.get_world_size()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(options.seed)
    task = tasks.load(options)
    with device:
        network = task.model().to(device)
    for block in network.blocks if options.compile else ():
        block.compile()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
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
    return rates


if __name__ == "__main__":
    main(sys.argv[1:])
