"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from trainer.errors import ConfigError
from trainer.task import CreateSchedule, Settings
from trainer.train_options import TrainOptions

_IMPLEMENTATIONS: dict[str | None, dict[str, Any]] = {
    None: {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
"""Arguments of torch's optimizers: https://docs.pytorch.org/docs/stable/optim.html#algorithms"""


def create(options: TrainOptions, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD with momentum 0.9, or AdamW, as `options.optimizer` says."""
    decay, how = options.weight_decay, _IMPLEMENTATIONS[options.optimizer_implementation]
    if options.optimizer == "sgd":
        return SGD(parameters, lr=options.lr, momentum=0.9, weight_decay=decay, **how)
    return AdamW(parameters, lr=options.lr, weight_decay=decay, **how)


def groups(model: nn.Module, settings: Settings | None = None) -> list[Any]:
    """The trainable parameters; in groups where their settings or their meshes of ranks differ.

    `settings` gives those of a parameter by its name, such as a weight decay of its own. An
    optimizer updates a group at once, and torch refuses to mix meshes there.
    """
    by_kind: dict[Any, list[nn.Parameter]] = {}
    for name, each in model.named_parameters():
        if each.requires_grad:
            own = tuple(sorted(settings(name).items())) if settings else ()
            by_kind.setdefault((own, getattr(each, "device_mesh", None)), []).append(each)
    if len(by_kind) == 1 and not settings:
        return next(iter(by_kind.values()))
    return [{"params": each, **dict(own)} for (own, _), each in by_kind.items()]


class GroupSettings:
    """What the parameter groups of a new optimizer hold: what differs later is state to save.

    The settings come from the command line and the task, and the learning rate from its schedule,
    also when a run is resumed. Some optimizers count steps in a group, or adapt a value of it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [_settings(group) for group in optimizer.param_groups]

    def changed(self, optimizer: Optimizer) -> set[str]:
        """The names of settings that the optimizer has changed in any group."""
        now = [_settings(group) for group in optimizer.param_groups]
        return {
            name
            for group, before in zip(now, self._groups, strict=True)
            for name, value in group.items()
            if name not in before or not _same(value, before[name])
        }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    names = group.keys() - {"params", "lr", "initial_lr"}
    return {name: copy.deepcopy(group[name]) for name in names}


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)


@torch.no_grad()
def complete_state(optimizer: Optimizer) -> None:
    """Give parameters that no loss has used yet the state of a fresh optimizer.

    Optimizers make a parameter's state in its first step. A checkpoint has that of all parameters,
    because one that resumes expects it.
    """
    groups = optimizer.param_groups
    trainable = [each for group in groups for each in group["params"] if each.requires_grad]
    missing = [each for each in trainable if each not in optimizer.state]
    if not missing or len(missing) == len(trainable):  # before the first step, torch does it
        return
    settings, gradients = [dict(group) for group in groups], [each.grad for each in trainable]
    for group in groups:
        group["lr"] = 0.0
    for parameter in trainable:
        parameter.grad = None
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in missing:
        if "step" in (state := optimizer.state[parameter]):
            state["step"] *= 0  # a tensor or a number
    for group, before in zip(groups, settings, strict=True):
        group.update(before)
    for parameter, gradient in zip(trainable, gradients, strict=True):
        parameter.grad = gradient


def lr_schedule(
    options: TrainOptions,
    optimizer: Optimizer,
    steps: int,
    completed: int = 0,
    create: CreateSchedule | None = None,
) -> LRScheduler:
    """The learning-rate scheduler of a run of `steps` steps, `completed` of which are done.

    The rate rises linearly over `options.warmup` steps, then stays constant or follows half a
    cosine down to 0, unless the task's `create` says otherwise. It is a function of the step alone,
    so a checkpoint does not store it. Raises ConfigError if that of the task is not.
    """
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ConfigError(
            "Task.optimizer: the learning rate is None, so no schedule can change it: set one "
            "(for transformers' Adafactor: lr=1e-3, relative_step=False)"
        )
    if create is not None:
        return _advanced(create(optimizer, steps), completed)

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


def _advanced(schedule: LRScheduler, steps: int) -> LRScheduler:
    """A new scheduler after so many steps."""
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(
            "Task.lr_schedule: ReduceLROnPlateau needs the validation loss, but schedules here "
            "depend only on the step: choose another schedule, or stop early with --patience"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer made no steps: another process did
        for _ in range(steps):
            schedule.step()
    return schedule
