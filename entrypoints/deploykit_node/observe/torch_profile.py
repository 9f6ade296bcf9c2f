"""Profile some steps of the program with PyTorch's profiler; the program knows nothing of it.

`hook/sitecustomize.py` loads this file by its path when the program starts. A step is one call of
``step()`` of a ``torch.optim.Optimizer``, which PyTorch reports to a global hook; of several
optimizers, the first one that comes to the first step counts.
https://docs.pytorch.org/docs/stable/generated/torch.optim.optimizer.register_optimizer_step_post_hook.html
"""

# ruff: noqa: PTH103, PTH120 - the program pays for each import

from __future__ import annotations

import atexit
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_MODULE = "torch.optim.optimizer"
_MOST = 100_000
"""Allocations and frees that are remembered, each with its stack: some hundred MB of RAM."""


def begin(steps: str, path: str) -> None:
    """Profile the steps ``FIRST:LAST`` into the trace `path`, once the program imports torch.

    For ``memory``, record what it allocates, and write that at an out-of-memory error. For
    ``nsys:FIRST:LAST``, show the steps to Nsight Systems, below which the program runs.
    """
    if steps == "memory":
        sys.meta_path.insert(0, _AfterImport(_Memory(path).attach))
        return
    of_nsys = steps.startswith("nsys:")
    first, last = map(int, steps.removeprefix("nsys:").split(":"))
    profile = (_Range if of_nsys else _Profile)(first, last, path)
    sys.meta_path.insert(0, _AfterImport(profile.attach))
    atexit.register(profile.finish)


class _AfterImport:
    """A finder that finds nothing itself: it calls back once `_MODULE` has been imported."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the module, as Python finds it, with a loader that calls back."""
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Profile:
    """Counts the steps of each optimizer, and profiles the wanted ones. No error leaves it."""

    def __init__(self, first: int, last: int, path: str) -> None:
        self._first, self._last, self._path = first, last, path
        self._steps: dict[int, int] = {}
        """By the id of an optimizer."""
        self._chosen: int | None = None
        self._profiler: Any = None
        self._hook: Any = None

    def attach(self, module: ModuleType) -> None:
        """Ask PyTorch to report each step."""
        try:
            self._hook = module.register_optimizer_step_post_hook(self._after_step)
        except Exception as error:  # noqa: BLE001 - the program runs on
            _say(f"no profile: {error!r}")

    def _after_step(self, optimizer: object, *_: object) -> None:
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        try:
            if self._profiler is None and steps == self._first - 1:
                self._chosen, self._profiler = id(optimizer), self._started()
            elif self._profiler is not None and id(optimizer) == self._chosen:
                if steps < self._last:
                    self._profiler.step()
                else:
                    self._write(steps)
        except Exception as error:  # noqa: BLE001 - the program runs on
            self._end()
            _say(f"no profile: {error!r}")

    def finish(self) -> None:
        """Write what there is when the program ends before the last step."""
        if self._hook is None:
            return
        try:
            if self._profiler is not None:
                self._write(self._steps[self._chosen or 0])
            else:
                most = max(self._steps.values(), default=0)
                _say(f"no profile: the program ended after {most} optimizer steps")
        except Exception as error:  # noqa: BLE001 - the program has ended as it has
            _say(f"no profile: {error!r}")

    def _started(self) -> Any:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        return profiler

    def _write(self, step: int) -> None:
        """Stop, and write the trace: complete under its name, or not at all."""
        profiler = self._profiler
        self._end()
        profiler.stop()
        os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
        scratch = f"{self._path.removesuffix('.gz')}.{os.getpid()}.gz"
        profiler.export_chrome_trace(scratch)
        os.replace(scratch, self._path)  # noqa: PTH105
        self._tell(step)

    def _tell(self, step: int) -> None:
        if os.environ.get("RANK") == "0":
            _say(f"profiled steps {self._first} to {step}: {self._path}")

    def _end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._profiler = None


class _Range(_Profile):
    """Shows the wanted steps to Nsight Systems, which records between two calls of CUDA's.

    https://docs.pytorch.org/docs/stable/generated/torch.cuda.profiler.start.html
    """

    def _started(self) -> Any:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("nsys can record individual steps only on a GPU, but there is none")
        torch.cuda.profiler.start()
        return self

    def step(self) -> None:
        """A step has ended, which nsys need not know."""

    def _write(self, step: int) -> None:
        """End the range, once the GPU has done all of it; nsys writes its report."""
        import torch

        self._end()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        self._tell(step)


class _Memory:
    """Records allocations on GPUs, and writes them when one has no memory left.

    https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def attach(self, _: ModuleType) -> None:
        """Begin once the program uses a GPU; before, it may still fork."""
        try:
            import torch

            torch.cuda._lazy_call(self._start)  # noqa: SLF001 - the public calls would begin CUDA
        except Exception as error:  # noqa: BLE001 - the program runs on
            _say(f"no memory snapshots: {error!r}")

    def _start(self) -> None:
        try:
            import torch

            torch.cuda.memory._record_memory_history(max_entries=_MOST)  # noqa: SLF001 - documented
            bindings: Any = torch._C  # noqa: SLF001 - as above
            bindings._cuda_attach_out_of_memory_observer(self._write)  # noqa: SLF001
        except Exception as error:  # noqa: BLE001 - the program runs on
            _say(f"no memory snapshots: {error!r}")

    def _write(self, device: int, *_: int) -> None:
        """Write what is allocated: complete under its name, or not at all."""
        try:
            import torch

            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            scratch = f"{self._path}.{os.getpid()}"
            torch.cuda.memory._dump_snapshot(scratch)  # noqa: SLF001 - documented
            os.replace(scratch, self._path)  # noqa: PTH105
            _say(f"GPU {device} is out of memory; a snapshot of its allocations is in {self._path}")
        except Exception as error:  # noqa: BLE001 - the program gets its own error
            _say(f"no memory snapshot: {error!r}")


def _say(text: str) -> None:
    print(f"deploykit: {text}", file=sys.stderr, flush=True)
