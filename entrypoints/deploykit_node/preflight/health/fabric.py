"""EFA and InfiniBand devices, as the kernel shows them in ``/sys/class/infiniband``.

https://docs.kernel.org/infiniband/sysfs.html (the file system ABI: sysfs-class-infiniband).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deploykit_node.preflight.health.record import Health

DEVICES = Path("/sys/class/infiniband")
_ERRORS = {
    "counters/symbol_error": "symbol errors",
    "counters/link_downed": "times that the link went down",
    "counters/port_rcv_errors": "receive errors",
    "hw_counters/rx_drops": "dropped packets",
    "hw_counters/rdma_read_wr_err": "failed RDMA reads",
}
"""Counters of a port, InfiniBand's and EFA's, that grow with a bad cable or a full device."""
_MANY = 1000
"""Errors since the start of the machine that are worth a warning."""


def check(health: Health) -> None:
    """Add what is wrong with the devices, and how many there are."""
    if not DEVICES.is_dir():
        return
    for device in sorted(DEVICES.iterdir()):
        kind = "EFA" if _is_efa(device) else "InfiniBand"
        for port in sorted((device / "ports").glob("*")):
            now = state(port)
            active = now == "ACTIVE"
            name = f"{kind} devices that are active"
            health.counts[name] = health.counts.get(name, 0) + active
            if not active:
                sentence = f"{kind} device {device.name} is {now or 'in no known state'}"
                health.faults.append((f"{sentence}: check its cable, or restart the node", False))
            health.faults += ((sentence, False) for sentence in _errors(device.name, port))


def _is_efa(device: Path) -> bool:
    return (device / "device" / "driver").resolve().name == "efa" or device.name.startswith("efa")


def _errors(name: str, port: Path) -> Iterator[str]:
    for counter, words in _ERRORS.items():
        count = text(port / counter)
        if count.isdecimal() and int(count[:18]) >= _MANY:
            yield f"{name} has counted {count[:18]} {words}: check its cable and its switch"


def state(port: Path) -> str:
    """The state of a port, such as ``ACTIVE``; empty where the kernel does not tell it."""
    return text(port / "state").partition(": ")[2]


def text(path: Path) -> str:
    """What the kernel shows in a file; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
