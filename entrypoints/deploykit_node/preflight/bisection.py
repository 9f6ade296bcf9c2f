"""Which part of NCCL keeps the group from forming: it is tried without one part after another.

Pure. Each trial leaves out one more of what NCCL can send through, the last one NCCL itself. Where
a trial passes, the part that it left out is left out alone, so that the answer is one part.
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_P2P = {"NCCL_P2P_DISABLE": "1"}
_SHM = {"NCCL_SHM_DISABLE": "1"}
_NET = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}


class Trial(NamedTuple):
    """What is different from the job's own settings."""

    env: Mapping[str, str]
    part: str
    """What is probably broken if this helps."""
    backend: str | None = None


TRIALS = (
    Trial(_P2P, "direct access between GPUs (PCIe or NVLink: check ACS and IOMMU, NVLink, Xids)"),
    Trial({**_P2P, **_SHM}, "shared memory (check the size of /dev/shm and --ipc of containers)"),
    Trial({**_P2P, **_SHM, **_NET}, "InfiniBand, RoCE, EFA or a network plugin of NCCL"),
    Trial({}, "", "gloo"),
    Trial(_SHM, "shared memory (check the size of /dev/shm and --ipc of containers)"),
    Trial(_NET, "InfiniBand, RoCE, EFA or a network plugin of NCCL"),
)
_GLOO = 3
_ALONE = {1: 4, 2: 5}
"""The trial with the part alone that a trial left out last."""


def part(number: int) -> str:
    """The name of a trial's part of the test."""
    return f"trial {number}"


class Bisection:
    """The trials that were made, as node 0 knows them."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._helped: int | None = None

    def after(self, passed: bool) -> tuple[int | None, str]:  # noqa: FBT001 - the only argument
        """The next trial after one that has passed or not, or else what all of them have shown.

        The first call is about the group as the job has it.
        """
        last = self._next
        if last is None:
            self._next = 0
        elif passed:
            self._helped, self._next = last, _ALONE.get(last)
        else:
            self._next = last + 1 if last < _GLOO else None
        return self._next, "" if self._next is not None else _answer(self._helped)


def _answer(helped: int | None) -> str:
    """What the trials have shown, and the variables that help."""
    if helped is None:
        return "It fails with Gloo too, so NCCL is not the cause: check interfaces and ports"
    best = TRIALS[helped]
    if best.backend == "gloo":
        return (
            "NCCL hangs even over plain sockets alone, and Gloo works: check that "
            "the driver fits NCCL, and NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says more. Until then: "
            "init_process_group('gloo')"
        )
    variables = " ".join(f"{name}={value}" for name, value in best.env.items())
    return (
        f"NCCL hangs, but works with {variables}: the fault is in {best.part}. "
        "To train meanwhile, more slowly, set that in env of the job"
    )
