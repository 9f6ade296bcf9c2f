"""Waiting for other ranks is communication: what sending costs beyond what computing hides.

torch (2.13) has no hook for it, so what Python waits with is wrapped, once for the process; DDP
waits in C++, and is watched from autograd.
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

from trainer.timing import Clock

PART = "communication"
_engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - as torch's own FSDP does
_thread = threading.local()
_clock: Clock | None = None


def count(clock: Clock) -> None:
    """From now on every wait of this process for other ranks is a part of `clock`'s steps."""
    global _clock  # noqa: PLW0603 - there is one torch to wrap
    if _clock is None:
        distributed.Work.wait = _counted(distributed.Work.wait)  # type: ignore[method-assign]
        functional.wait_tensor = _counted(functional.wait_tensor)
    _clock = clock


def _counted(wait: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wait)
    def timed(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(_thread, "aside", False):
            return wait(*arguments, **options)
        assert _clock is not None  # noqa: S101 - set before anything is wrapped
        with _clock(PART):
            return wait(*arguments, **options)

    return timed


@contextmanager
def aside() -> Iterator[None]:
    """In here, on this thread, waiting is no part of a step."""
    _thread.aside = True
    try:
        yield
    finally:
        _thread.aside = False


def watch(replica: nn.Module, clock: Clock) -> None:
    """Count how long DDP's `replica` waits when the gradients of a backward pass are computed.

    DDP waits in a callback at the end of the backward pass. One that is queued before it, when the
    pass begins, comes first, and one that this one queues comes last.
    """

    def computed() -> None:
        part = clock(PART)
        part.__enter__()
        _engine.queue_callback(partial(part.__exit__, None, None, None))

    def begun(_gradient: Tensor) -> None:
        _engine.queue_callback(computed)

    def forward(_module: nn.Module, _inputs: Any, outputs: Tensor) -> None:
        if outputs.requires_grad:
            outputs.register_hook(begun)

    replica.register_forward_hook(forward)
