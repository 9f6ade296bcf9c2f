"""Lines and transfers over TCP: what both ends of the preflight test share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

BULK = 1 << 20
"""Bytes of a transfer."""
LEAST = 1 << 14
"""Bytes that arrive if large packets pass at all."""
PATIENCE = 2.5
"""Seconds that the receiver waits for more of a transfer before it reports what has come."""


_WAITED = Path("/proc/self/schedstat")


def waited() -> float:
    """Seconds for which this thread has been ready and had no processor; 0 where that is unknown.

    https://docs.kernel.org/scheduler/sched-stats.html
    """
    try:
        return int(_WAITED.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.wait_for` that raises TimeoutError in all versions of Python."""
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:  # noqa: UP041 - not TimeoutError in Python 3.10
        raise TimeoutError from None


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """The next line. Raises EOFError if the connection was closed."""
    line = await reader.readline()
    if not line:
        raise EOFError
    return line


async def write(writer: asyncio.StreamWriter, line: bytes) -> None:
    """Write a line and wait until it is on its way."""
    writer.write(line)
    await writer.drain()
