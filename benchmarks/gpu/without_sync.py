"""The trainer with an error where a step that is not logged waits for the GPU.

https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))

import train

_FIRST = 3
"""Steps in which memory is allocated and libraries start."""
_step = train.Trainer.train_step


def _watched(self: train.Trainer, *given: Any) -> None:
    number = self.step + 1
    quiet = number > _FIRST and number % self.options.log_every
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")
    _step(self, *given)
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    train.Trainer.train_step = _watched  # type: ignore[method-assign]
    sys.exit(train.main())
