"""The links between the nodes over TCP: a greeting, then a transfer on an ephemeral port.

The trainer's connections use such ports. Both ends of a connection first prove that they know the
key of this attempt; then a request and its reply are a line of JSON each.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import itertools
import json
import secrets
import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from deploykit_node.network import addresses
from deploykit_node.preflight.peers import PORTS, Peers, Record
from deploykit_node.preflight.speeds import SLOW, waited

T = TypeVar("T")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Work = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one connection of a node."""
Reply = Callable[[Record], Awaitable[Record]]
"""Makes the reply to a report."""

BULK = 1 << 20
"""Bytes of a transfer."""
_ENOUGH = 1 << 14
"""Bytes that arrive if large packets pass at all."""
_PATIENCE = 2.5
"""Seconds that the receiver waits for more of a transfer before it reports what has come."""
_LONGEST = 1 << 20
"""Bytes of a line: enough for a node's links to ten thousand others."""
_RANDOM = 32
"""Bytes of a random number, and of a proof."""
_SEGMENT = 536
"""Bytes of a TCP segment that any network carries: RFC 9293, section 3.7.1."""
_ON_THE_WIRE = 0.02
"""Share of a transfer's time that is the network's in any case."""
_TRIES = 3
_PAUSE = 0.2
_HANDSHAKE = 10.0
"""Seconds for a proof to come after a connection was opened."""
_SPARE = 64
"""Connections without a proof beside four per node. When there are more, the oldest is closed.

A node sends its proof at once, so that strangers cannot keep it out.
"""
_FAILURES = (OSError, EOFError, ValueError)


class Stranger(ConnectionError):
    """The other end of a connection does not know the key."""


async def authenticate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, listening: bool
) -> None:
    """Prove to the other end that this one knows the key, and have it prove the same.

    A proof is HMAC-SHA-256 (RFC 2104) over the side and both random numbers. Raises Stranger.
    """
    own = secrets.token_bytes(_RANDOM)
    writer.write(own)
    other = await reader.readexactly(_RANDOM)
    numbers = own + other if listening else other + own
    listens, connects = (hmac.digest(key, side + numbers, "sha256") for side in (b"L", b"C"))
    writer.write(listens if listening else connects)
    proof = await reader.readexactly(_RANDOM)
    if not hmac.compare_digest(proof, connects if listening else listens):
        raise Stranger("the other end does not have the key")


class Server:
    """One node's server. It answers greetings and transfers itself, and reports by `reply`."""

    def __init__(self, peers: Peers, reply: Reply) -> None:
        self._peers, self._reply = peers, reply
        self._open: set[asyncio.Task[Any]] = set()
        self._unproved: dict[asyncio.Task[Any], None] = {}
        """Connections without a proof so far, the oldest first."""
        self._servers: list[asyncio.Server] = []
        self.bulk_port = 0
        """The port for transfers."""
        self.ignored = 0
        """Connections of strangers."""

    async def start(self) -> None:
        """Listen. Raises OSError if none of the ports is free."""
        address = listening_address(self._peers)
        handler = partial(self._serve, self._receive)
        bulk = await asyncio.start_server(handler, address, 0, limit=_LONGEST)
        self.bulk_port = bulk.sockets[0].getsockname()[1]
        self._servers = [bulk, await self._listen(address)]

    async def _listen(self, address: str) -> asyncio.Server:
        handler = partial(self._serve, self._answer)
        listen = partial(asyncio.start_server, handler, limit=_LONGEST, backlog=1024)
        if self._peers.held:  # it goes on listening when torchrun has the socket
            return await listen(sock=self._peers.held.dup())
        ports = self._peers.ports(self._peers.node)
        for port in ports:
            with contextlib.suppress(OSError):
                return await listen(host=address, port=port, reuse_address=True)
        raise OSError(errno.EADDRINUSE, f"TCP ports {ports[0]} to {ports[-1]} are in use")

    async def stop(self, patience: float) -> None:
        """Finish the open replies within `patience` seconds, and stop listening."""
        if proved := self._open - self._unproved.keys():
            await asyncio.wait(proved, timeout=patience)
        for server in self._servers:
            server.close()

    async def _serve(
        self, work: Work, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a connection, once its other end has proved that it is a node of this job."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in a task
        self._open.add(task)
        self._unproved[task] = None
        if len(self._unproved) > _SPARE + 4 * len(self._peers.hosts):
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.cancel()
            self.ignored += 1
        try:
            proof = authenticate(reader, writer, self._peers.key, listening=True)
            await _within(_HANDSHAKE, proof)
            self._unproved.pop(task, None)
            await work(reader, writer)
        except Stranger:
            self.ignored += 1
        except (*_FAILURES, asyncio.CancelledError):  # the other end has gone, or it is too late
            pass
        finally:
            self._open.discard(task)
            self._unproved.pop(task, None)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await _read(reader)
        if "report" in request:
            reply = await self._reply(request)
        else:
            reply = {"node": self._peers.node, "time": time.time(), "bulk": self.bulk_port}
        await _write(writer, reply)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Count bytes until all have come, none comes any more, or it takes too long."""
        await _read(reader)
        begun, waited_before, received = time.monotonic(), waited(), 0
        while received < BULK and (received < _ENOUGH or time.monotonic() < begun + _PATIENCE):
            try:
                block = await _within(_PATIENCE, reader.read(1 << 16))
            except TimeoutError:
                break
            if not block:
                break
            received += len(block)
        seconds = time.monotonic() - begun
        count = {"bytes": received, "seconds": seconds, "waited": waited() - waited_before}
        await _write(writer, count)


def listening_address(peers: Peers) -> str:
    """All addresses of this node, as others may know it by any; of one machine, its own loopback.

    Whoever connects has to prove that it is a node.
    """
    own = peers.addresses[peers.node]
    if len(peers.hosts) == 1:
        return "127.0.0.1"
    if own and all(addresses.is_loopback(address) for address in peers.addresses if address):
        return own
    version = ipaddress.ip_address(own).version if own else 4
    return "::" if version == 6 else "0.0.0.0"  # noqa: PLR2004, S104 - IPv6; as above


async def test(peers: Peers, deadline: float) -> dict[int, Record]:
    """The state of the link to each node that this one tests, by `deadline` (`time.monotonic`)."""
    lock = asyncio.Semaphore(1)  # one transfer at a time has the whole bandwidth
    nodes = peers.tested
    links = await asyncio.gather(*(_link(peers, node, deadline, lock) for node in nodes))
    return dict(zip(nodes, links, strict=True))


async def own_rate(peers: Peers, port: int, deadline: float) -> float | None:
    """The median rate of this node to itself in bytes per second; None if there is no time."""
    address, lock = listening_address(peers), asyncio.Semaphore(1)
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 - any
    tried = [await _transfer(peers, address, port, deadline, lock) for _ in range(_TRIES)]
    rates = [link["rate"] for link in tried if "rate" in link]
    return statistics.median(rates) if rates else None


async def ask(peers: Peers, node: int, port: int, request: Record, seconds: float) -> Record:
    """Send a request to a node and return its reply.

    Raises OSError (also TimeoutError), EOFError, or ValueError if the reply is no JSON.
    """

    async def exchange() -> Record:
        async with _connected(peers, peers.addresses[node], port, small=True) as (reader, writer):
            await _write(writer, request)
            return await _read(reader)

    return await _within(seconds, exchange())


@contextlib.asynccontextmanager
async def _connected(
    peers: Peers, address: str, port: int, *, small: bool = False
) -> AsyncIterator[Streams]:
    """A connection whose other end is a node of this job.

    A `small` one works despite a wrong MTU: messages arrive where large packets do not.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        connection.setblocking(False)
        if small:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=_LONGEST)
        stack.pop_all()
    try:
        await authenticate(reader, writer, peers.key, listening=False)
        yield reader, writer
    finally:
        writer.transport.abort()


async def _link(peers: Peers, node: int, deadline: float, lock: asyncio.Semaphore) -> Record:
    """Greet a node, then send it a mebibyte: the best of up to three times.

    A busy machine can look like a bad link.
    """
    link = await _greet(peers, node, deadline)
    if link["state"] != "ok" or node == peers.only_greeted:
        return link
    best: Record = {}
    for _ in range(_TRIES):
        result = await _transfer(peers, peers.addresses[node], link["bulk"], deadline, lock)
        if result and result.get("rate", 0.0) >= best.get("rate", 0.0):
            best = result
        if best.get("state") not in {"slow", "stalled"}:
            break
    return {**link, **best}


async def _greet(peers: Peers, node: int, deadline: float) -> Record:
    """Greet `node` until it replies, as it may still be starting. Returns the link's state.

    `clock` is the other node's clock minus ours, in seconds, give or take `seconds`.
    """
    if not peers.addresses[node]:
        return {"state": "unknown"}
    ports = peers.ports(node)
    last: Record = {"state": "dropped", "port": ports[0]}
    for attempt in itertools.count():
        left = deadline - time.monotonic()
        if left <= 0:
            break
        port, begun = ports[attempt % PORTS], time.time()
        try:
            greeting = await ask(peers, node, port, {}, left)
        except _FAILURES as error:
            state = _state(error)
            if port == ports[0] and state != "dropped":  # the initial state, and that at the end
                last = {"state": state, "port": port}
        else:
            if greeting["node"] != node:
                last = {"state": "other", "port": port}
            else:
                seconds = time.time() - begun
                clock = greeting["time"] - begun - seconds / 2
                link = {"state": "ok", "port": port, "bulk": greeting["bulk"]}
                return {**link, "seconds": seconds, "clock": clock}
        await asyncio.sleep(min(_PAUSE, max(0.0, deadline - time.monotonic())))
    return last


async def _transfer(
    peers: Peers, address: str, port: int, deadline: float, lock: asyncio.Semaphore
) -> Record:
    """The link's state and rate in bytes per second; empty if no time is left."""
    if (left := deadline - time.monotonic()) < _PATIENCE:
        return {}
    failure = "ports"
    try:
        async with contextlib.AsyncExitStack() as stack:
            connection = stack.enter_async_context(_connected(peers, address, port))
            reader, writer = await _within(left, connection)
            failure = "stalled"
            async with lock:
                if deadline - time.monotonic() < _PATIENCE:
                    return {}
                return await _send(reader, writer)
    except _FAILURES as error:
        return {"state": failure, "bulk": port, "how": _state(error)}


async def _send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Record:
    """Send a mebibyte, and return the state and rate by what has arrived."""
    await _write(writer, {})
    before = waited()
    writer.write(bytes(BULK))
    count = await _within(3 * _PATIENCE, _read(reader))
    if count["bytes"] < _ENOUGH:
        raise EOFError
    rate = rate_of(count["bytes"], count["seconds"], waited() - before + count["waited"])
    return {"state": "ok" if rate >= SLOW else "slow", "rate": rate}


def rate_of(size: int, seconds: float, waited_for: float) -> float:
    """Bytes per second; where that is slow, without the time for which an end had no processor.

    Both may have had none at the same time, so a part of the time is never subtracted. Subtracting
    it can make a link look fifty times as fast as it is, and other links slow beside it.
    """
    seconds = max(seconds, 1e-6)
    if size / seconds >= SLOW:
        return size / seconds
    return size / max(seconds - waited_for, seconds * _ON_THE_WIRE)


def _state(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "dropped"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    unreachable = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL, errno.EACCES, errno.EPERM}
    return "unreachable" if getattr(error, "errno", None) in unreachable else "closed"


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.wait_for` that raises TimeoutError in all versions of Python."""
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:  # noqa: UP041 - not TimeoutError in Python 3.10
        raise TimeoutError from None


async def _read(reader: asyncio.StreamReader) -> Record:
    """The next line. Raises EOFError if the connection was closed."""
    line = await reader.readline()
    if not line:
        raise EOFError
    record: Record = json.loads(line)
    return record


async def _write(writer: asyncio.StreamWriter, record: Record) -> None:
    """Write a line and wait until it is on its way."""
    writer.write(json.dumps(record).encode() + b"\n")
    await writer.drain()
