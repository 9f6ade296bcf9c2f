"""NVIDIA's GPUs, as their driver describes them through NVML (the package nvidia-ml-py).

https://docs.nvidia.com/deploy/nvml-api/ and https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from deploykit_node.preflight import health
from deploykit_node.preflight.health import Fault, Health

_THROTTLING = {
    0x08: ("is throttled by its hardware", "its power supply and temperature"),
    0x20: ("is overheating and throttled by its driver", "the cooling"),
    0x40: ("is overheating and throttled by its hardware", "the cooling"),
    0x80: ("is throttled by the power supply's brake signal", "the power supply"),
}
"""Bits of the reasons for a low clock that are not ordinary ones, and what to check."""
_NEAR = 5
"""Degrees below the temperature at which the hardware slows down."""
_USED = 1 << 30
"""Bytes that are in use before the job has started."""
_SLOW_CLOCK = 0.5
"""Share of the highest clock that an application may have set."""


def check(record: Health) -> None:
    """Add what is wrong with the GPUs, and how many there are."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        if health.DRIVER.exists():
            record.skipped.append("GPUs (nvidia-ml-py is not installed)")
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if health.DRIVER.exists():
            record.faults.append((f"NVIDIA's driver does not respond: {error}", True))
        return
    try:
        record.counts["GPUs"] = count = nvml.nvmlDeviceGetCount()
        for index in range(count):
            record.faults += _faults(nvml, index)
    finally:
        nvml.nvmlShutdown()


def _faults(nvml: Any, index: int) -> Iterator[Fault]:
    """What is wrong with one GPU. A driver or a GPU that does not support a check passes it."""
    name = f"GPU {index}"
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        yield f"{name} is lost to the driver ({error}): reset the GPU, or restart the node", True
        return
    for part in (
        _memory_errors,
        _ecc_mode,
        _rows,
        _clocks,
        _set_clock,
        _heat,
        _pcie,
        _nvlink,
        _use,
    ):
        try:
            for text, fatal in part(nvml, gpu):
                yield f"{name} {text}", fatal
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                yield f"{name} is lost to the driver ({error}): restart the node", True
                return


def _memory_errors(nvml: Any, gpu: Any) -> Iterator[Fault]:
    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    count = nvml.nvmlDeviceGetTotalEccErrors(gpu, uncorrected, volatile)
    if count:
        text = f"has had {count} uncorrectable memory errors (ECC) since the driver was loaded"
        yield f"{text}: reset it", True


def _ecc_mode(nvml: Any, gpu: Any) -> Iterator[Fault]:
    current, pending = nvml.nvmlDeviceGetEccMode(gpu)
    if current != pending:
        yield "has a pending ECC mode change, which requires a reset", False


def _rows(nvml: Any, gpu: Any) -> Iterator[Fault]:
    _, uncorrectable, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
    if failed:
        yield "could not remap a bad memory row (row remapping failed): replace the GPU", True
    elif pending:
        yield "must be reset to remap a bad memory row (row remapping)", True
    elif uncorrectable:
        yield f"has remapped {uncorrectable} bad memory rows", False


def _clocks(nvml: Any, gpu: Any) -> Iterator[Fault]:
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    for bit, (text, where) in _THROTTLING.items():
        if reasons & bit:
            yield f"{text}: check {where}", False


def _set_clock(nvml: Any, gpu: Any) -> Iterator[Fault]:
    """The clock that was set for applications, where the driver still has that setting."""
    limit = nvml.nvmlDeviceGetApplicationsClock(gpu, nvml.NVML_CLOCK_SM)
    highest = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
    if limit < highest * _SLOW_CLOCK:
        text = f"has its clock limited to {limit} MHz of {highest}"
        yield f"{text}: run nvidia-smi --reset-gpu-clocks", False


def _heat(nvml: Any, gpu: Any) -> Iterator[Fault]:
    now = nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
    limit = nvml.nvmlDeviceGetTemperatureThreshold(gpu, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    if now > limit - _NEAR:
        yield f"is at {now} °C while idle, and throttles at {limit} °C: check the cooling", False


def _pcie(nvml: Any, gpu: Any) -> Iterator[Fault]:
    now, most = nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu), nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)
    if now < most:
        yield f"uses only {now} of {most} PCIe lanes: check its slot, riser and cable", False


def _nvlink(nvml: Any, gpu: Any) -> Iterator[Fault]:
    """Links that are down beside others that are up; a GPU without NVLink has none."""
    up, down = 0, []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(gpu, link):
                up += 1
            else:
                down.append(str(link))
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            break  # it has no more
    if up and down:
        yield f"has NVLinks down ({', '.join(down)}): check the fabric manager and the links", False


def _use(nvml: Any, gpu: Any) -> Iterator[Fault]:
    used = nvml.nvmlDeviceGetMemoryInfo(gpu).used
    if used > _USED:
        yield f"already has {used / 2**30:.1f} GiB of memory in use by another process", False
