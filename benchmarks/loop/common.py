"""What every loop has in common: model, data, optimizer, and the clock.

The clock is the process's own CPU time between the forward passes of two training steps, seen by a
hook on the model, so no loop has to be changed for it. Each file prints one line of JSON, from
rank 0: ``{"cpu_ms": mean, "steps": counted, "loss": last}``. The mean, since what a loop does only
now and then, such as logging, belongs to it.
"""

from __future__ import annotations

import gc
import json
import os
import time

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

BATCH = 32
"""Samples a rank and step."""
STEPS = int(os.environ.get("LOOP_STEPS", "300"))
WARM_UP = 50
"""Steps that are not counted, of all `STEPS`."""
LEARNING_RATE = 1e-3


class Clock:
    """The CPU time at each training forward."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def tick(self, module: nn.Module, _: object) -> None:
        if module.training:
            self.moments.append(time.process_time())

    def report(self, loss: float) -> None:
        """Print the line, on rank 0. Raises ValueError when not every step was seen."""
        if len(self.moments) != STEPS:
            raise ValueError(f"{len(self.moments)} training steps were seen, not {STEPS}")
        if os.environ.get("RANK", "0") != "0":
            return
        counted = self.moments[WARM_UP:]
        steps = len(counted) - 1
        mean = (counted[-1] - counted[0]) * 1000 / steps
        print(json.dumps({"cpu_ms": mean, "steps": steps, "loss": loss}), flush=True)


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def model(clock: Clock) -> nn.Module:
    """64-128-128-10, the same first weights in every loop."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    network = nn.Sequential(*layers)
    network.register_forward_pre_hook(clock.tick)
    return network


def dataset() -> TensorDataset:
    """As many samples as `STEPS` full batches of all ranks need: one epoch, no more."""
    made = torch.Generator().manual_seed(0)
    count = STEPS * BATCH * world()
    images = torch.randn(count, 64, generator=made)
    return TensorDataset(images, images[:, :10].argmax(dim=1))


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels)


def leave() -> None:
    """End the group: threads of gloo that outlive Python abort the process."""
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()
