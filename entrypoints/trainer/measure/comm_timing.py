"""Communication time: how long a rank waits for others, beyond what is overlapped with compute.

torch (2.13) has no hook for this, so the functions that wait in Python are wrapped while training
runs, and only then. DDP waits in C++ and is timed through autograd callbacks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional

from trainer.measure.timing import StepTimer

SECTION = "communication"
_engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - as FSDP does
_thread = threading.local()


@contextmanager
def timed_waits(timer: StepTimer) -> Iterator[None]:
    """Report every wait of this process for other ranks in the block to `timer`."""
    waits = distributed.Work.wait, functional.wait_tensor
    timed = [_timed(wait, timer) for wait in waits]
    distributed.Work.wait, functional.wait_tensor = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        distributed.Work.wait, functional.wait_tensor = waits  # type: ignore[method-assign]


def _timed(wait: Callable[..., Any], timer: StepTimer) -> Callable[..., Any]:
    @wraps(wait)
    def timed(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(_thread, "excluded", False):
            return wait(*arguments, **options)
        with timer(SECTION):
            return wait(*arguments, **options)

    return timed


@contextmanager
def excluded() -> Iterator[None]:
    """Do not count waits of this thread in the block, such as those of a background save."""
    _thread.excluded = True
    try:
        yield
    finally:
        _thread.excluded = False


def instrument_ddp(replica: nn.Module, timer: StepTimer) -> None:
    """Report to `timer` how long DDP's `replica` waits at the end of each backward pass.

    DDP waits in a callback that runs when the gradients are computed. It queues it with the last
    gradient, so a callback that is queued with the first one runs before it, and one queued by that
    callback runs after it.
    """
    queued = False

    def gradients_computed() -> None:
        nonlocal queued
        queued = False
        section = timer(SECTION)
        section.__enter__()
        _engine.queue_callback(partial(section.__exit__, None, None, None))

    def gradient_added(_parameter: Tensor) -> None:
        nonlocal queued
        if not queued:
            queued = True
            _engine.queue_callback(gradients_computed)

    for parameter in replica.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gradient_added)
