"""A stand-in for nvidia-ml-py: healthy GPUs, but for what ``FAKE_NVML`` says, as JSON.

``{"count": 8, "1": {"nvmlDeviceGetTotalEccErrors": 2}}``; ``"lost"`` is an error as a result. Its
functions have the names, arguments and results of the real module's (12.575).
"""

import json
import os
from types import SimpleNamespace

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_GPU_IS_LOST = 3, 15
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_CLOCK_SM = 1, 0, 1
NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, NVML_NVLINK_MAX_LINKS = 0, 1, 36
_HEALTHY = {
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetRemappedRows": [0, 0, 0, 0],
    "nvmlDeviceGetCurrentClocksThrottleReasons": 1,  # idle
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetApplicationsClock": "unsupported",
    "nvmlDeviceGetTemperature": 31,
    "nvmlDeviceGetTemperatureThreshold": 87,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetHandleByIndex": None,
}


class NVMLError(Exception):
    """An error with the number that the driver gives."""

    def __init__(self, value):
        super().__init__({3: "Not Supported", 9: "Driver Not Loaded", 15: "GPU is lost"}[value])
        self.value = value


def _faults():
    return json.loads(os.environ.get("FAKE_NVML", "{}"))


def _answer(name, gpu):
    answer = _faults().get(str(gpu), {}).get(name, _HEALTHY.get(name))
    if answer in ("lost", "unsupported"):
        raise NVMLError(15 if answer == "lost" else 3)
    return answer


def nvmlInit():  # noqa: N802 - the real names
    if _faults().get("init") == "fails":
        raise NVMLError(9)


def nvmlShutdown():  # noqa: N802
    pass


def nvmlDeviceGetCount():  # noqa: N802
    return _faults().get("count", 8)


def nvmlDeviceGetHandleByIndex(index):  # noqa: N802
    _answer("nvmlDeviceGetHandleByIndex", index)
    return index


def nvmlDeviceGetNvLinkState(gpu, link):  # noqa: N802
    if link >= 18:
        raise NVMLError(3)
    return int(link not in (_faults().get(str(gpu), {}).get("down", [])))


def nvmlDeviceGetMemoryInfo(gpu):  # noqa: N802
    return SimpleNamespace(used=_faults().get(str(gpu), {}).get("used", 500 << 20))


def __getattr__(name):
    if name not in _HEALTHY:
        raise AttributeError(name)
    return lambda gpu, *_: _answer(name, gpu)
