"""A node beside the network: its devices and disks, and what must be alike on all nodes.

A check that cannot run says so, and is not a fault. All run in a thread of their own, since a
broken disk or driver can make a check wait forever.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploykit_node import environment
from deploykit_node.network import interfaces
from deploykit_node.preflight.peers import Record

Environ = Mapping[str, str]
Fault = tuple[str, bool]
"""A sentence without its subject, and whether the job must not start."""

DRIVER = Path("/proc/driver/nvidia/version")
KERNEL_LOG = Path("/dev/kmsg")
DEVICES = Path("/sys/class/infiniband")
"""EFA and InfiniBand: https://docs.kernel.org/infiniband/sysfs.html (sysfs-class-infiniband)."""
INTERFACES = Path("/sys/class/net")
"""https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-class-net"""
CPU_GROUPS = Path("/sys/fs/cgroup")
OWN_CPU_GROUP = Path("/proc/self/cgroup")
_SHM = "/dev/shm"  # noqa: S108 - the kernel's own name
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_FOLDERS = ("DEPLOYKIT_OUTPUT_DIR", "DEPLOYKIT_CHECKPOINT_DIR", "TMPDIR")
_DCGM_SECONDS = 8.0
_DCGM = {226: False, 205: True}
"""Exit codes after a failed test, and whether it asks to isolate the GPU.

-30 and -51 as a byte: DCGM_ST_NVVS_ERROR and DCGM_ST_NVVS_ISOLATE_ERROR of dcgm_structs.h
"""
_COUNTERS = {
    "counters/symbol_error": "symbol errors",
    "counters/link_downed": "link failures",
    "counters/port_rcv_errors": "receive errors",
    "hw_counters/rx_drops": "dropped packets",
    "hw_counters/rdma_read_wr_err": "failed RDMA reads",
}
"""Counters of a port, InfiniBand's and EFA's, that grow with a bad cable or a full device."""
_MANY_ERRORS = 1000
"""Errors since the start of the machine that are worth a warning."""
_BROKEN = {errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT}
"""Errors of a file system that no other setting of the job repairs."""
_RECENT = 3600.0
"""Seconds: what the kernel said earlier may have been repaired."""
_LONGEST = 160
_PROGRAMS = {"13", "31", "43", "45"}
"""Xids that a program causes, not the GPU: https://docs.nvidia.com/deploy/xid-errors/"""
_LINES = {
    "a GPU has reported Xid {}": re.compile(r"NVRM: Xid \([^)]*\): (\d+)"),
    "an NVSwitch has reported SXid {}": re.compile(r"SXid \([^)]*\): (\d+)"),
    "the processor or memory has reported a hardware error": re.compile(
        r"Hardware Error\]|Machine Check|EDAC .*\bUE\b"
    ),
    "a file system or disk has failed": re.compile(
        r"(?:EXT4|XFS|BTRFS)\S* .*error|blk_update_request: .*error|I/O error, dev", re.IGNORECASE
    ),
    "a PCIe device has reported an error": re.compile(r"AER: .*(?:Uncorrect|Fatal)"),
    "the kernel has killed a process: out of memory": re.compile(r"Out of memory: Killed"),
    "a network link went down": re.compile(r"link is down|Link is Down|NIC Link is Down"),
}


def facts(env: Environ, route: interfaces.Route | None) -> Record:
    """What can make a job fail, sizes in bytes. `route` leads to another node."""
    interface = route.interface if route else None
    nccl = next((version for version in map(environment.version, _NCCL) if version), None)
    folders = sorted({env.get(name) or tempfile.gettempdir() for name in _FOLDERS})
    spaces = {folder: _free(folder) for folder in folders if folder.startswith("/")}  # not s3://
    return {
        "address": route.source if route else None,
        "interface": interface,
        "mtu": interfaces.mtu(interface) if interface else None,
        "line_rate": line_rate(interface),
        "versions": {"driver": _driver(), "torch": environment.version("torch"), "NCCL": nccl},
        "shm": _free(_SHM),
        "disks": {folder: space for folder, space in spaces.items() if space is not None},
    }


def _driver() -> str | None:
    """NVIDIA's driver; the first line reads ``NVRM version: ... Kernel Module ... 570.86.15``."""
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _text(DRIVER))
    return match[1] if match else None


def _free(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def line_rate(interface: str | None) -> float | None:
    """Bytes per second that this node's network devices can carry, as their drivers say.

    Of all active EFA or InfiniBand ports, which NCCL prefers; else of the interface. None where the
    driver does not say, as in many virtual machines.
    """
    rate = 0.0
    for port in DEVICES.glob("*/ports/*"):
        match = re.match(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec", _text(port / "rate"))
        rate += float(match[1]) * 1e9 / 8 if match and _state(port) == "ACTIVE" else 0.0
    speed = _text(INTERFACES / (interface or "") / "speed")
    return rate or (int(speed) * 1e6 / 8 if speed.isdecimal() else None)


def _state(port: Path) -> str:
    """The state of a port, such as ``ACTIVE``; empty if the kernel does not show it."""
    return _text(port / "state").partition(": ")[2]


def _text(path: Path) -> str:
    """What the kernel shows in a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


@dataclass
class Health:
    """What the checks have found on this node."""

    faults: list[Fault] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """What must be the same on all nodes, by its name."""
    skipped: list[str] = field(default_factory=list)
    """Checks that could not run, and why."""


class Running:
    """Checks that run in a thread of their own from now on."""

    def __init__(self, checks: Mapping[str, Callable[[Health], None]]) -> None:
        self._found, self._current, self._checks = Health(), "", checks
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for name, check in self._checks.items():
            self._current = name
            try:
                check(self._found)
            except Exception as error:  # noqa: BLE001 - a check that breaks is no fault of the node
                self._found.skipped.append(f"{name} ({error!r})")

    def record(self, deadline: float) -> dict[str, Any]:
        """What is known by `deadline` (`time.monotonic`)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        faults = list(self._found.faults)
        if self._thread.is_alive():
            text = f"checking its {self._current} timed out: a driver or disk may be hanging"
            faults.append((text, False))
        counts, skipped = dict(self._found.counts), list(self._found.skipped)
        return {"faults": faults, "counts": counts, "skipped": skipped}


def check_devices(health: Health) -> None:
    """Add what is wrong with EFA and InfiniBand devices, and how many are active."""
    for port in sorted(DEVICES.glob("*/ports/*")):
        device = port.parents[1]
        driver = (device / "device" / "driver").resolve().name
        kind = "EFA" if driver == "efa" or device.name.startswith("efa") else "InfiniBand"
        state, name = _state(port), f"active {kind} devices"
        health.counts[name] = health.counts.get(name, 0) + (state == "ACTIVE")
        if state != "ACTIVE":
            sentence = f"{kind} device {device.name} is {state or 'in an unknown state'}"
            health.faults.append((f"{sentence}: check its cable, or restart the node", False))
        for counter, words in _COUNTERS.items():
            count = _text(port / counter)
            if count.isdecimal() and int(count) >= _MANY_ERRORS:
                sentence = f"{device.name} has counted {count} {words}"
                health.faults.append((f"{sentence}: check its cable and its switch", False))


def check_processors(health: Health) -> None:
    """Add the number of processors: fewer by affinity, or by the limit of a cgroup.

    https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max)
    """
    usable = len(os.sched_getaffinity(0))
    group = re.search(r"^0::/(.*)$", _text(OWN_CPU_GROUP), re.MULTILINE)
    own = CPU_GROUPS / (group[1] if group else "")
    texts = (_text(folder / "cpu.max") for folder in (own, *own.parents))
    quotas = (re.fullmatch(r"(\d+) ([1-9]\d*)", text) for text in texts)
    allowed = min((int(quota[1]) / int(quota[2]) for quota in quotas if quota), default=math.inf)
    health.counts["CPUs"] = math.ceil(min(usable, allowed))


def check_disks(health: Health, env: Environ) -> None:
    """Add the folders where the job writes that take no file."""
    for folder in sorted({env.get(name) or tempfile.gettempdir() for name in _FOLDERS}):
        if not Path(folder).is_dir():
            continue
        try:
            with tempfile.NamedTemporaryFile(prefix=".deploykit-", dir=folder) as file:
                file.write(os.urandom(1 << 18))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            text = f"cannot write to {folder}: {error.strerror}"
            health.faults.append((text, error.errno in _BROKEN))


def check_kernel_log(health: Health) -> None:
    """Add what the kernel has said in the last hour about hardware that fails."""
    seen = set()
    try:
        lines = list(_kernel_lines())
    except OSError:
        health.skipped.append("kernel log (not readable)")
        return
    for line in lines:
        for words, pattern in _LINES.items():
            match = pattern.search(line)
            if match is None or (match.groups() and match[1] in _PROGRAMS):
                continue
            text = words.format(*match.groups())
            if text not in seen:
                seen.add(text)
                shown = "".join(c if c.isprintable() else "?" for c in line)[:_LONGEST]
                health.faults.append((f"{text}: {shown}", False))


def _kernel_lines() -> Iterator[str]:
    """The recent messages: ``6,339,5140900,-;text``, the third number microseconds since the start.

    https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg
    """
    log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    blocks = []
    try:
        with contextlib.suppress(BlockingIOError):  # the end
            while True:
                with contextlib.suppress(BrokenPipeError):  # overwritten while it was read
                    blocks.append(os.read(log, 1 << 16))
                    if not blocks[-1]:
                        break
    finally:
        os.close(log)
    since = (time.monotonic() - _RECENT) * 1e6
    for line in b"".join(blocks).decode(errors="replace").splitlines():
        match = re.match(r"\d+,\d+,(\d+),[^;]*;(.*)", line)
        if match and int(match[1]) >= since:
            yield match[2]


def check_dcgm(health: Health) -> None:
    """Run NVIDIA's own quick diagnostic, where DCGM is installed; its exit code counts."""
    program = shutil.which("dcgmi")
    if program is None:
        return
    argv, null = [program, "diag", "--run", "1"], subprocess.DEVNULL
    try:
        code = subprocess.run(
            argv, stdin=null, stdout=null, stderr=null, timeout=_DCGM_SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        health.skipped.append(f"DCGM (no result in {_DCGM_SECONDS:.0f} s)")
        return
    if code in _DCGM:
        text = f"DCGM's diagnostic failed with exit code {code}: run dcgmi diag -r 1 on the node"
        health.faults.append((text, _DCGM[code]))
    elif code:
        health.skipped.append(f"DCGM (exit code {code} of dcgmi)")
