"""What the ranks of this node use: CPU, memory and GPU, recorded for `deploykit watch`.

Read from outside: the programs notice nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple, TypeVar

from deploykit_node import cluster, environment, records
from deploykit_node.cluster import Environ
from deploykit_node.log import now
from deploykit_node.observe import processes
from deploykit_node.records import RankUsage, SoftwareRecord, UsageRecord

Number = TypeVar("Number", int, float)

EVERY = 5.0
"""Seconds between two records."""
_SHARE = 0.01
"""Of the time so far, after which the history gets a line: 750 of them in a week."""
_NODES = 32
"""With more nodes each writes more seldom, to spare a shared file system."""
_PACKAGES = ("torch", "numpy", "accelerate", "deepspeed", "lightning", "transformers")
"""Those whose version is told, where they are installed."""
_LIBRARY = "libnvidia-ml.so.1"
_OK = 0
_NAME = 96
"""Bytes of a name (NVML_DEVICE_NAME_V2_BUFFER_SIZE); that of a version is shorter."""


class Recorder:
    """Records the usage of the ranks of this node, which register in `folder`."""

    def __init__(self, env: Environ, here: cluster.Cluster, folder: Path) -> None:
        self._env, self._folder = env, folder
        self._file = Path(env["DEPLOYKIT_RUN_DIR"], records.FOLDER, f"usage-{here.number}.json")
        self._history = _History(self._file.with_name(f"history-{here.number}.jsonl"))
        self._every = EVERY * max(1.0, len(here.hosts) / _NODES)
        self._due = 0.0
        self._cpu: dict[int, tuple[float, dict[int, float]]] = {}
        """By rank: when it was looked at, and the CPU seconds of its processes until then."""
        self._devices = Devices(env)
        self._software = self._file.with_name("software.json") if here.number == 0 else None

    def look(self) -> None:
        """Write a record if it is time. What cannot be read or written is left out."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            with contextlib.suppress(OSError, ValueError):
                record = self._record()
                records.write(self._file, record)
                self._history.add(record)
                self._tell_software()

    def _tell_software(self) -> None:
        """Write once what this node runs; by now the ranks have started, and do not wait for it."""
        if self._software is not None:
            file, self._software = self._software, None
            records.write(file, software(self._devices))

    def _record(self) -> UsageRecord:
        relays = records.living(self._folder)
        below = processes.trees(relays.values())
        ranks = {
            str(rank): self._of_rank(rank, position, below[relays[rank]])
            for position, rank in enumerate(sorted(relays))
        }
        return {"time": now(), "attempt": records.attempt(self._env), "ranks": ranks}

    def _of_rank(self, rank: int, position: int, pids: list[int]) -> RankUsage:
        """The usage of a rank's program and its children; its GPU is the one at its position."""
        gpu = self._devices.read(position)
        return {
            "cpu": self._percent(rank, processes.cpu_seconds(pids)),
            "rss": _resident(pids[0]) if pids else None,
            "gpu": gpu.percent if gpu else None,
            "gpu_memory": gpu.used if gpu else None,
            "gpu_size": gpu.size if gpu else None,
        }

    def _percent(self, rank: int, cpu: dict[int, float]) -> float | None:
        """Percent of a core since the last look; None at the first one."""
        moment, before = time.monotonic(), self._cpu.get(rank)
        self._cpu[rank] = moment, cpu
        if before is None:
            return None
        used = sum(seconds - before[1].get(pid, 0.0) for pid, seconds in cpu.items())
        return round(100 * max(0.0, used) / max(moment - before[0], 0.01), 1)


class _History:
    """The records over time, a line each, for the curves of `deploykit report`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begun = self._due = time.monotonic()
        self._most: dict[str, RankUsage] = {}
        """The greatest values since the last line."""

    def add(self, record: UsageRecord) -> None:
        """Take a record into account, and write a line if it is time."""
        for rank, one in record["ranks"].items():
            self._most[rank] = _greatest(self._most.get(rank, one), one)
        moment = time.monotonic()
        if moment >= self._due and self._most:
            self._due = moment + _SHARE * (moment - self._begun)
            line: UsageRecord = {**record, "ranks": self._most}
            self._most = {}
            with open(self._file, "a", encoding="utf-8", opener=records.private) as file:
                file.write(json.dumps(line) + "\n")


def _greatest(one: RankUsage, other: RankUsage) -> RankUsage:
    return {
        "cpu": _most(one["cpu"], other["cpu"]),
        "rss": _most(one["rss"], other["rss"]),
        "gpu": _most(one["gpu"], other["gpu"]),
        "gpu_memory": _most(one["gpu_memory"], other["gpu_memory"]),
        "gpu_size": _most(one["gpu_size"], other["gpu_size"]),
    }


def _most(one: Number | None, other: Number | None) -> Number | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _resident(pid: int) -> int | None:
    """Bytes of memory that a process has in RAM, shared ones included; None if it has ended.

    https://man7.org/linux/man-pages/man5/proc_pid_statm.5.html
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def software(devices: Devices) -> SoftwareRecord:
    """Versions of this Python and its packages, and the GPUs that the ranks see."""
    versions = {"Python": sys.version.split()[0], os.uname().sysname: os.uname().release}
    versions |= {it: version for it in _PACKAGES if (version := environment.version(it))}
    return {"versions": versions, "gpus": devices.names(), "driver": devices.driver()}


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
