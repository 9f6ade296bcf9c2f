"""Seconds per section of a training step, and how long a rank waits for others.

torch (2.13) has no hook for waits, and its profiler is too slow for every step. So the functions
that wait in Python are wrapped while training runs, and only then. DDP waits in C++ and is timed
through autograd callbacks.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.utils import _pytree as pytree

Item = TypeVar("Item")

WAITING = "communication"
"""The section of waits for other ranks, beyond what is overlapped with compute."""
_engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001 - as FSDP does
_thread = threading.local()


class StepTimer:
    """Seconds per section of a step, summed until `lap`. A nested section counts only once.

    On a GPU, which works behind Python, sections are delimited by events on its stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self.spans: list[tuple[str, str, Any, Any]] = []
        """Name, name of the outer section or '', start and end of those that have ended."""
        self.current = ""

    def __call__(self, section: str) -> _Section:
        """Time a block: ``with timer("forward"): ...``."""
        return _Section(self, section)

    def timed(self, section: str, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over `items`; the time to produce each one counts towards `section`."""
        iterator = iter(items)
        while True:
            started = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._seconds[section] += time.perf_counter() - started
            yield item

    def lap(self) -> dict[str, float]:
        """Seconds of each section since the last call; waits for the GPU."""
        if self._gpu and self.spans:
            torch.cuda.synchronize()
        seconds, spans = self._seconds, self.spans
        self._seconds, self.spans = defaultdict(float), []
        for section, outer, started, ended in spans:
            elapsed = started.elapsed_time(ended) / 1000 if self._gpu else ended - started
            seconds[section] += elapsed
            if outer:
                seconds[outer] -= elapsed
        return dict(seconds)

    def mark(self) -> Any:
        """The current time: seconds on a CPU, an event on the stream on a GPU."""
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Section:
    """A block that is timed. A class, since a generator takes three times as long to enter."""

    __slots__ = ("_name", "_outer", "_started", "_timer")

    def __init__(self, timer: StepTimer, name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        timer = self._timer
        self._outer, timer.current = timer.current, self._name
        self._started = timer.mark()

    def __exit__(self, *_: object) -> None:
        timer = self._timer
        timer.spans.append((self._name, self._outer, self._started, timer.mark()))
        timer.current = self._outer


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
        with timer(WAITING):
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
    gradient, so a callback that is queued with the gradient of the outputs runs before it, and one
    queued by that callback runs after it.
    """
    queued = False

    def gradients_computed() -> None:
        nonlocal queued
        queued = False
        section = timer(WAITING)
        section.__enter__()
        _engine.queue_callback(partial(section.__exit__, None, None, None))

    def backward_begins(_gradient: Tensor) -> None:
        nonlocal queued
        if not queued:
            queued = True
            _engine.queue_callback(gradients_computed)

    def watch(_replica: nn.Module, _inputs: Any, outputs: Any) -> None:
        for output in pytree.tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(backward_begins)

    replica.register_forward_hook(watch)
