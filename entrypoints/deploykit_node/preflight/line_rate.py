"""How many bytes per second the network devices of this node can carry, as their drivers say.

https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-class-net (speed), and of EFA and
InfiniBand https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-class-infiniband (rate)
"""

from __future__ import annotations

import re
from pathlib import Path

from deploykit_node.preflight.health import fabric

INTERFACES = Path("/sys/class/net")
_GIGABIT, _MEGABIT = 1e9 / 8, 1e6 / 8
"""Bytes."""
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec")
_SPEED = re.compile(r"\d{1,9}")


def of_node(interface: str | None) -> float | None:
    """That of all active EFA or InfiniBand ports, which NCCL prefers; else of the interface.

    None where the driver does not say, as in many virtual machines.
    """
    rates = [_rate(port) for port in fabric.DEVICES.glob("*/ports/*")]
    return sum(rates) or _speed(interface) or None


def _rate(port: Path) -> float:
    match = _RATE.match(fabric.text(port / "rate"))
    return float(match[1]) * _GIGABIT if match and fabric.state(port) == "ACTIVE" else 0.0


def _speed(interface: str | None) -> float:
    match = _SPEED.fullmatch(fabric.text(INTERFACES / (interface or "") / "speed"))
    return int(match[0]) * _MEGABIT if match else 0.0
