"""What all loops share: model, data, optimizer settings and the clock.

The clock is the CPU time of the process between the forward passes of two training steps. A hook
on the model reads it, so that no loop has to change. Each file prints one line of JSON on rank 0:
``{"cpu_ms": mean, "steps": counted, "loss": last, "start_s": seconds}``. It is the mean, since
occasional work such as logging is part of a loop; `start_s` is the CPU time until the second step.
In `turns.py` two loops take turns in one process, and each clock stands still in the other's turn.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

BATCH = 32
"""Samples per rank and step."""
STEPS = int(os.environ.get("LOOP_STEPS", "300"))
WARM_UP = 50
"""The first of the `STEPS`, which are not counted."""
LEARNING_RATE = 1e-3
COMPILE = "LOOP_COMPILE" in os.environ
"""Whether to compile each layer, for the loops that can."""
after_tick: Callable[[int], None] | None = None
"""Called with the number of steps so far; in `turns.py` it lets the other loop go on."""


class Clock:
    """The CPU time at each training forward."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self._others = 0.0

    def tick(self, module: nn.Module, _: object) -> None:
        """Record the CPU time, without that of other turns; a forward pre-hook."""
        if not module.training:
            return
        now = time.process_time()
        self.moments.append(now - self._others)
        if after_tick is not None:
            after_tick(len(self.moments))
            self._others += time.process_time() - now

    def report(self, loss: float) -> None:
        """Print the line on rank 0. Raises ValueError if the hook did not see every step."""
        if len(self.moments) != STEPS:
            raise ValueError(f"expected {STEPS} training steps, got {len(self.moments)}")
        if os.environ.get("RANK", "0") != "0":
            return
        counted = self.moments[WARM_UP:]
        steps = len(counted) - 1
        mean = (counted[-1] - counted[0]) * 1000 / steps
        told = {"cpu_ms": mean, "steps": steps, "loss": loss, "start_s": self.moments[1]}
        print(json.dumps(told), flush=True)


def world() -> int:
    """The number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def model(clock: Clock) -> nn.Module:
    """An MLP with layers of 64, 128, 128 and 10, with equal initial weights in every loop."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    network = nn.Sequential(*layers)
    network.register_forward_pre_hook(clock.tick)
    return network


def dataset() -> TensorDataset:
    """One epoch: `STEPS` full batches for all ranks; images (samples, 64), labels (samples,)."""
    made = torch.Generator().manual_seed(0)
    count = STEPS * BATCH * world()
    images = torch.randn(count, 64, generator=made)
    return TensorDataset(images, images[:, :10].argmax(dim=1))


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of outputs (batch, 10) and labels (batch,)."""
    return cross_entropy(outputs, labels)


def leave() -> None:
    """Destroy the process group: gloo threads that outlive Python abort the process."""
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()
