"""Utilisation and memory of this node's GPUs, by NVIDIA's NVML, where its library is there.

https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import NamedTuple

from deploykit_node.cluster import Environ

_LIBRARY = "libnvidia-ml.so.1"
_OK = 0
_NAME = 96
"""Bytes of a name (NVML_DEVICE_NAME_V2_BUFFER_SIZE); that of a version is shorter."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Gpu(NamedTuple):
    """A GPU now: percent of the time in which a kernel ran, bytes of memory in use and in all."""

    percent: int
    used: int
    size: int


class Devices:
    """The GPUs that ranks of this node see, in the order of ``CUDA_VISIBLE_DEVICES``."""

    def __init__(self, env: Environ, library: str = _LIBRARY) -> None:
        self._handles: list[ctypes.c_void_p] = []
        with contextlib.suppress(OSError, AttributeError):  # no driver, or a very old one
            self._library = ctypes.CDLL(library)
            if self._library.nvmlInit_v2() == _OK:
                self._handles = _visible(self._library, env.get("CUDA_VISIBLE_DEVICES"))

    def read(self, position: int) -> Gpu | None:
        """The GPU at a position, which is a rank's local rank; None where there is none."""
        if position >= len(self._handles):
            return None
        rates, memory, handle = _Utilization(), _Memory(), self._handles[position]
        codes = (
            self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)),
            self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
        )
        return Gpu(rates.gpu, memory.used, memory.total) if codes == (_OK, _OK) else None

    def names(self) -> list[str]:
        """What each GPU is called, such as ``NVIDIA H100 80GB HBM3``."""
        name = ctypes.create_string_buffer(_NAME)
        return [
            name.value.decode(errors="replace")
            for handle in self._handles
            if self._library.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME)) == _OK
        ]

    def driver(self) -> str:
        """The version of the driver; empty without GPUs."""
        text = ctypes.create_string_buffer(_NAME)
        if self._handles:
            self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_NAME))
        return text.value.decode(errors="replace")


def _visible(library: ctypes.CDLL, visible: str | None) -> list[ctypes.c_void_p]:
    """The devices; as for CUDA, those that follow an unknown one do not count."""
    if visible is None:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        visible = ",".join(map(str, range(count.value)))
    handles = []
    for name in filter(None, visible.split(",")):
        handle = _handle(library, name.strip())
        if handle is None:
            break
        handles.append(handle)
    return handles


def _handle(library: ctypes.CDLL, name: str) -> ctypes.c_void_p | None:
    """The device of an index, or of a UUID."""
    handle = ctypes.c_void_p()
    if name.isdecimal():
        code = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        code = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    return handle if code == _OK else None
