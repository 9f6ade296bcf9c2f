"""The machine itself: bandwidth of its memory, speed of its disks, and its kernel's log."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from deploykit_node.preflight.health.record import Health

KERNEL_LOG = Path("/dev/kmsg")
_RECENT = 3600.0
"""Seconds: what the kernel said earlier may have been repaired."""
_COPY, _COPIES = 16 << 20, 8
_FILE, _SMALL_FILE, _WRITES = 8 << 20, 1 << 18, 2
_FEW = 8
"""Nodes that each write a large file into a folder that they share; more write a small one."""
_FOLDERS = ("DEPLOYKIT_OUTPUT_DIR", "DEPLOYKIT_CHECKPOINT_DIR")
_BROKEN = {errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT}
"""Errors of a file system that no other setting of the job repairs."""
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


def check_memory(health: Health) -> None:
    """Add the bandwidth at which one core copies, in bytes per second: the best of some tries."""
    source, target = bytes(_COPY), bytearray(_COPY)
    best = float("inf")
    for _ in range(_COPIES):
        begun = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - begun)
    health.speeds["memory"] = _COPY / best


def check_disks(health: Health, env: Mapping[str, str], nodes: int) -> None:
    """Add the speed at which each folder is written where the job writes."""
    scratch = env.get("TMPDIR") or tempfile.gettempdir()
    sizes = {env.get(name, ""): _FILE if nodes <= _FEW else _SMALL_FILE for name in _FOLDERS}
    for folder, size in {**sizes, scratch: _FILE}.items():
        if not folder.startswith("/") or not Path(folder).is_dir():
            continue
        try:
            seconds = min(_write(folder, size) for _ in range(_WRITES))
        except OSError as error:
            text = f"cannot write into {folder}: {error.strerror}"
            health.faults.append((text, error.errno in _BROKEN))
        else:
            if size == _FILE:
                health.speeds[f"disk {folder}"] = size / seconds


def _write(folder: str, size: int) -> float:
    """The seconds for writing a file to the disk. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=".deploykit-", dir=folder)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 - a descriptor
            begun = time.perf_counter()
            file.write(os.urandom(1 << 16) * (size >> 16))
            file.flush()
            os.fsync(file.fileno())
            return max(time.perf_counter() - begun, 1e-6)
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()


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
                health.faults.append((f"{text}: {_printable(line)}", False))


def _kernel_lines() -> Iterator[str]:
    """The recent messages: ``6,339,5140900,-;text``, the third number microseconds since the start.

    https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg
    """
    log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    rest = ""
    try:
        while True:
            try:
                block = os.read(log, 1 << 16)
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten while it was read
                continue
            if not block:
                break
            rest += block.decode(errors="replace")
    finally:
        os.close(log)
    since = (time.monotonic() - _RECENT) * 1e6
    for line in rest.splitlines():
        head, _, text = line.partition(";")
        fields = head.split(",")
        if len(fields) > 2 and fields[2].isdecimal() and int(fields[2][:18]) >= since:  # noqa: PLR2004
            yield text


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:_LONGEST]
