"""The optimizer, and its learning rate at every step."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable

from torch import nn
from torch.optim import SGD, AdamW, Optimizer


def make(options: argparse.Namespace, parameters: Iterable[nn.Parameter]) -> Optimizer:
    decay = options.weight_decay
    if options.optimizer == "sgd":
        return SGD(parameters, lr=options.lr, momentum=0.9, weight_decay=decay)
    return AdamW(parameters, lr=options.lr, weight_decay=decay)


def rate(options: argparse.Namespace, step: int, steps: int) -> float:
    """The learning rate of step `step` of `steps`, both counted from 1."""
    warm = min(1.0, step / options.warmup) if options.warmup else 1.0
    if options.lr_schedule == "constant":
        return options.lr * warm
    left = (step - options.warmup) / max(1, steps - options.warmup)
    return options.lr * warm * (1 + math.cos(math.pi * min(max(left, 0.0), 1.0))) / 2


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
