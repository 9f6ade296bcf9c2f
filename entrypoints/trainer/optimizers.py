"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainer.train_options import TrainOptions


def create(options: TrainOptions, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD with momentum 0.9, or AdamW, as `options.optimizer` says."""
    decay = options.weight_decay
    if options.optimizer == "sgd":
        return SGD(parameters, lr=options.lr, momentum=0.9, weight_decay=decay)
    return AdamW(parameters, lr=options.lr, weight_decay=decay)


def lr_schedule(
    options: TrainOptions, optimizer: Optimizer, steps: int, completed: int = 0
) -> LambdaLR:
    """The learning-rate scheduler of a run of `steps` steps, `completed` of which are done.

    The rate rises linearly over `options.warmup` steps, then stays constant or follows half a
    cosine down to 0. It is a function of the step alone, so a checkpoint does not store it.
    """

    def factor(epoch: int) -> float:
        step = completed + epoch + 1  # torch counts scheduler steps from 0
        warmup = min(1.0, step / options.warmup) if options.warmup else 1.0
        if options.lr_schedule == "constant":
            return warmup
        decayed = (step - options.warmup) / max(1, steps - options.warmup)
        return warmup * (1 + math.cos(math.pi * min(max(decayed, 0.0), 1.0))) / 2

    if options.precision == "fp16":  # a first step that overflows is skipped, on purpose
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    return LambdaLR(optimizer, factor)
