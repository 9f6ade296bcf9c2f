"""One node's server in the preflight test: replies to greetings, transfers and reports."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Awaitable, Callable
from typing import Any

from deploykit_node.preflight import messages, wire
from deploykit_node.preflight.messages import LONGEST, REQUEST, Foreign, Record
from deploykit_node.preflight.peers import Peers

Reply = Callable[[Record], Awaitable[Record]]
"""Makes the reply to a request."""
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one connection."""

_BLOCK = 1 << 16
_GONE = (OSError, EOFError, asyncio.CancelledError)
"""The other end has gone, or this test is over."""
_LISTENING = 10.0
"""Seconds for a request to come after a connection was opened."""
_SPARE = 64
"""Connections that may wait for a request beside four per node. Of more the oldest is closed.

A node sends its request at once, so that others cannot keep it out.
"""


class Server:
    """The server. It answers greetings and transfers itself, and other requests by `reply`."""

    def __init__(self, peers: Peers, reply: Reply) -> None:
        self._peers, self._reply = peers, reply
        self._open: set[asyncio.Task[Any]] = set()
        self._waiting: dict[asyncio.Task[Any], None] = {}
        """Those that have not sent a request of a node of this job, the oldest first."""
        self._servers: list[asyncio.Server] = []
        self.bulk_port = 0
        """The port for transfers."""
        self.ignored = 0
        """Requests that no node of this job has sent."""

    async def start(self) -> None:
        """Listen. Raises OSError if none of the ports is free."""
        address = self._peers.listening_address()
        bulk = await asyncio.start_server(
            self._handler(self._serve_transfer), address, 0, limit=LONGEST
        )
        self.bulk_port = bulk.sockets[0].getsockname()[1]
        self._servers = [bulk, await self._listen(address)]

    async def _listen(self, address: str) -> asyncio.Server:
        handler = self._handler(self._serve_request)
        if self._peers.held:  # it goes on listening when torchrun has the socket
            same = self._peers.held.dup()
            return await asyncio.start_server(handler, sock=same, limit=LONGEST, backlog=1024)
        ports = self._peers.ports(self._peers.node)
        for port in ports:
            with contextlib.suppress(OSError):
                return await asyncio.start_server(
                    handler, address, port, limit=LONGEST, backlog=1024, reuse_address=True
                )
        raise OSError(errno.EADDRINUSE, f"TCP ports {ports[0]} to {ports[-1]} are in use")

    async def stop(self, patience: float) -> None:
        """Finish the open replies within `patience` seconds, and stop listening."""
        if self._open:
            await asyncio.wait(self._open, timeout=patience)
        for server in self._servers:
            server.close()

    def _handler(self, serve: Serve) -> Serve:
        """`serve` with limits and error handling for one connection."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - a coroutine runs in a task
            self._open.add(task)
            self._waiting[task] = None
            if len(self._waiting) > _SPARE + 4 * len(self._peers.hosts):
                self._close_oldest()
            try:
                await serve(reader, writer)
            except ValueError:  # Foreign, a line without end, no JSON
                self.ignored += 1
            except _GONE:
                pass
            finally:
                self._open.discard(task)
                self._waiting.pop(task, None)
                writer.close()

        return handle

    def _close_oldest(self) -> None:
        """Close the connection that has waited longest for a request."""
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        oldest.cancel()
        self.ignored += 1

    async def _read_request(self, reader: asyncio.StreamReader) -> Record:
        """The request on a connection. Raises Foreign if no node of this job has sent it."""
        line = await wire.within(_LISTENING, wire.read_line(reader))
        request = self._peers.seal.read(line, REQUEST)
        messages.check_request(request, len(self._peers.hosts))
        if request["run"] != self._peers.name:
            raise Foreign("another attempt")
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in a task
        self._waiting.pop(task, None)
        return request

    async def _serve_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request = await self._read_request(reader)
        if request["kind"] == "hello":
            reply = {"node": self._peers.node, "time": time.time(), "bulk": self.bulk_port}
        else:
            reply = await self._reply(request)
        await wire.write(writer, self._peers.seal.write(reply, messages.reply_to(request)))

    async def _serve_transfer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Accept a transfer, then reply how many bytes came in how many seconds."""
        request = await self._read_request(reader)
        purpose = messages.reply_to(request)
        await wire.write(writer, self._peers.seal.write({}, purpose))
        await wire.write(writer, self._peers.seal.write(await _count(reader), purpose))


async def _count(reader: asyncio.StreamReader) -> Record:
    """Count bytes until all have come, none comes any more, or it takes too long."""
    begun, waited, received = time.monotonic(), wire.waited(), 0
    while received < wire.BULK and (
        received < wire.LEAST or time.monotonic() < begun + wire.PATIENCE
    ):
        try:
            block = await asyncio.wait_for(reader.read(_BLOCK), wire.PATIENCE)
        except asyncio.TimeoutError:  # noqa: UP041 - not TimeoutError in Python 3.10
            break
        if not block:
            break
        received += len(block)
    seconds = time.monotonic() - begun
    return {"bytes": received, "seconds": seconds, "waited": wire.waited() - waited}
