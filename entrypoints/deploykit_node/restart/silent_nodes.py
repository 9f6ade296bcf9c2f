"""Nodes that accept no connection, looked for at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from deploykit_node.records import HeartbeatRecord

_AT_ONCE = 256
"""Connections at a time; a process may have 1,024 files open."""


def find(heartbeats: Mapping[int, HeartbeatRecord], seconds: float) -> list[int]:
    """The nodes, in order, that accept no connection within so many seconds."""
    return sorted(asyncio.run(_silent(heartbeats, seconds)))


async def _silent(heartbeats: Mapping[int, HeartbeatRecord], seconds: float) -> list[int]:
    """The nodes that accept no connection."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def answers(record: HeartbeatRecord) -> bool:
        async with room:
            return await _answers(record, seconds)

    answered = await asyncio.gather(*map(answers, heartbeats.values()))
    return [node for node, answer in zip(heartbeats, answered, strict=True) if not answer]


async def _answers(record: HeartbeatRecord, seconds: float) -> bool:
    connecting = asyncio.open_connection(record["host"], record["port"])
    try:
        _, writer = await asyncio.wait_for(connecting, seconds)
    except (OSError, asyncio.TimeoutError):  # noqa: UP041 - not TimeoutError in Python 3.10
        return False
    writer.close()
    return True
