"""The GPUs and CPUs of this machine, and the end of its processes. Starts no program."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable, Mapping
from pathlib import Path

from deploykit.job.decode import whole

_ROOT = Path("/")


def visible(env: Mapping[str, str]) -> str | None:
    """CUDA_VISIBLE_DEVICES of a program with these variables in addition to this process's."""
    return env.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpus(visible: str | None = None) -> int | None:
    """The number of GPUs; None if unknown.

    `visible` is CUDA_VISIBLE_DEVICES, which hides all others; entries after an invalid number
    are ignored:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    if (_ROOT / "dev/dxg").exists():  # Windows shows its GPUs to Linux as one device
        return None
    count = _nvidia() or _amd()
    if visible is None or not count:
        return count
    names = [name.strip() for name in visible.split(",")]
    numbers = [whole(name) for name in names if name]
    if any(number is None for number in numbers):  # UUIDs, or -1
        return None
    hidden = [number for number in numbers if number is not None and number >= count]
    return len(numbers) if not hidden else numbers.index(hidden[0])


def gpu_groups(size: int, visible: str | None = None) -> list[str]:
    """Values of CUDA_VISIBLE_DEVICES with `size` GPUs each, none of them shared."""
    count = (gpus(visible) or 0) if size else 0
    names = visible.split(",") if visible else list(map(str, range(count)))
    starts = range(0, count - size + 1, size) if count else ()
    return [",".join(names[start : start + size]) for start in starts]


def _nvidia() -> int:
    """Devices that the driver lists.

    https://download.nvidia.com/XFree86/Linux-x86_64/550.54.14/README/procinterface.html
    """
    listed = len(list((_ROOT / "proc/driver/nvidia/gpus").glob("*/information")))
    return listed or len(list((_ROOT / "dev").glob("nvidia[0-9]*")))


def _amd() -> int:
    """Nodes of the kernel's topology with a ``gpu_id`` other than 0, which CPUs have."""
    ids = (_ROOT / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(1 for path in ids if path.read_text().strip() not in {"", "0"})


def cpus() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def await_end(files: Iterable[Path], timeout: float) -> None:
    """Return once a process whose id is in one of the files has ended, or after `timeout` s."""
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        for file in files:
            try:
                descriptor = os.pidfd_open(int(file.read_text()))
            except ProcessLookupError:
                return
            except (AttributeError, OSError, ValueError):  # before Linux 5.3, or no such file
                continue
            stack.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)
        poll.poll(timeout * 1000)
