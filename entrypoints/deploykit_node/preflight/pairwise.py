"""Test the links of this node over TCP: a short exchange, then a transfer on an ephemeral port.

The trainer's connections use such ports. A request and its reply are one signed line each
(`messages`), so that no node believes another job or another user.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import statistics
import time

from deploykit_node.preflight import messages, wire
from deploykit_node.preflight.messages import LONGEST, REQUEST, Record
from deploykit_node.preflight.peers import PORTS, Peers

SLOW = 12.5e6
"""Bytes per second (100 Mbit/s) below which a transfer is repeated before it is believed."""

_SEGMENT = 536
"""Bytes of a TCP segment that any network carries: RFC 9293, section 3.7.1."""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where this node listens
_LEAST_ON_THE_WIRE = 0.02
"""Share of a transfer's time that is the network's in any case."""
_TRIES = 3
_PAUSE = 0.2


async def test(peers: Peers, deadline: float) -> dict[int, Record]:
    """The state of the link to each node that this one tests, by `deadline` (`time.monotonic`)."""
    wire_lock = asyncio.Semaphore(1)  # one transfer at a time has the whole bandwidth
    nodes = peers.tested
    links = await asyncio.gather(*(_link(peers, n, deadline, wire_lock) for n in nodes))
    return dict(zip(nodes, links, strict=True))


async def own_rate(peers: Peers, port: int, deadline: float) -> float | None:
    """The median rate of this node to itself in bytes per second; None if there is no time."""
    address, lock = _LOOPBACK.get(peers.listening_address()), asyncio.Semaphore(1)
    address = address or peers.listening_address()
    tried = [await _transfer(peers, address, port, deadline, lock) for _ in range(_TRIES)]
    rates = [one["rate"] for one in tried if "rate" in one]
    return statistics.median(rates) if rates else None


async def _link(peers: Peers, node: int, deadline: float, lock: asyncio.Semaphore) -> Record:
    link = await _greet(peers, node, deadline)
    if link["state"] == "ok" and node != peers.only_greeted:
        link.update(await _best_transfer(peers, node, link["bulk"], deadline, lock))
    return link


async def ask(peers: Peers, node: int, port: int, request: Record, seconds: float) -> Record:
    """Send a request to a node and return its reply.

    Raises OSError (also TimeoutError), EOFError, or ValueError if the reply is not the node's.
    """
    return await wire.within(seconds, _ask(peers, peers.addresses[node], port, request))


async def _ask(peers: Peers, address: str, port: int, request: Record) -> Record:
    reader, writer = await asyncio.open_connection(
        sock=await _small_segments(address, port), limit=LONGEST
    )
    try:
        await wire.write(writer, peers.seal.write(request, REQUEST))
        return peers.seal.read(await wire.read_line(reader), messages.reply_to(request))
    finally:
        writer.close()


async def _small_segments(address: str, port: int) -> socket.socket:
    """A connection that works despite a wrong MTU: messages arrive where large packets do not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    return connection


async def _greet(peers: Peers, node: int, deadline: float) -> Record:
    """Greet `node` until it replies, as it may still be starting. Returns the link's state."""
    if not peers.addresses[node]:
        return {"state": "unknown"}
    ports = peers.ports(node)
    last: Record = {"state": "dropped", "port": ports[0]}
    attempt = 0
    while (left := deadline - time.monotonic()) > 0:
        port = ports[attempt % PORTS]
        sent_at, request = time.time(), peers.request("hello")
        try:
            greeting = await ask(peers, node, port, request, left)
            messages.check_greeting(greeting)
        except (OSError, EOFError, ValueError) as error:
            state = _state(error)
            if port == ports[0] and state != "dropped":  # the initial state, and that at the end
                last = {"state": state, "port": port}
        else:
            if greeting.get("node") == node:
                return _greeted(greeting, port, sent_at)
            last = {"state": "other", "port": port, "answered": greeting.get("node")}
        attempt += 1
        await asyncio.sleep(min(_PAUSE, max(0.0, deadline - time.monotonic())))
    return last


def _greeted(greeting: Record, port: int, sent_at: float) -> Record:
    """The link after a greeting. `clock` is the peer's clock minus ours, in seconds."""
    received_at = time.time()
    clock = greeting["time"] - (sent_at + received_at) / 2
    seconds = received_at - sent_at
    return {
        "state": "ok",
        "port": port,
        "bulk": greeting["bulk"],
        "seconds": seconds,
        "clock": clock,
    }


async def _best_transfer(
    peers: Peers, node: int, port: int, deadline: float, lock: asyncio.Semaphore
) -> Record:
    """The best of up to three transfers: a busy machine can look like a bad link."""
    best: Record = {}
    for _ in range(_TRIES):
        result = await _transfer(peers, peers.addresses[node], port, deadline, lock)
        if result and result.get("rate", 0.0) >= best.get("rate", 0.0):
            best = result
        if best.get("state") not in {"slow", "stalled"}:
            break
    return best


async def _transfer(
    peers: Peers, address: str, port: int, deadline: float, lock: asyncio.Semaphore
) -> Record:
    """The link's state and rate in bytes per second; empty if no time is left."""
    if (left := deadline - time.monotonic()) < wire.PATIENCE:
        return {}
    failure = "ports"
    try:
        connection = asyncio.open_connection(address, port, limit=LONGEST)
        reader, writer = await wire.within(left, connection)
        failure = "stalled"
        try:
            async with lock:
                return await _send_bulk(peers, reader, writer, deadline)
        finally:
            writer.transport.abort()
    except (OSError, EOFError, ValueError) as error:
        how = _state(error)
        return (
            {"state": "files"} if how == "files" else {"state": failure, "bulk": port, "how": how}
        )


async def _send_bulk(
    peers: Peers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline: float
) -> Record:
    if deadline - time.monotonic() < wire.PATIENCE:
        return {}
    request = peers.request("send")
    purpose = messages.reply_to(request)
    await wire.write(writer, peers.seal.write(request, REQUEST))
    peers.seal.read(await wire.within(3 * wire.PATIENCE, wire.read_line(reader)), purpose)
    waited = wire.waited()
    writer.write(bytes(wire.BULK))
    line = await wire.within(3 * wire.PATIENCE, wire.read_line(reader))
    count = peers.seal.read(line, purpose)
    messages.check_count(count)
    if count["bytes"] < wire.LEAST:
        raise EOFError
    rate = rate_of(count["bytes"], count["seconds"], wire.waited() - waited + count["waited"])
    return {"state": "ok" if rate >= SLOW else "slow", "rate": rate}


def rate_of(size: int, seconds: float, waited: float) -> float:
    """Bytes per second; where that is slow, without the time for which an end had no processor.

    Both may have had none at the same time, so a part of the time is never subtracted. Subtracting
    it can make a link look fifty times as fast as it is, and other links slow beside it.
    """
    seconds = max(seconds, 1e-6)
    if size / seconds >= SLOW:
        return size / seconds
    return size / max(seconds - waited, seconds * _LEAST_ON_THE_WIRE)


def _state(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "dropped"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    number = getattr(error, "errno", None)
    if number in {errno.EMFILE, errno.ENFILE}:
        return "files"
    if number in {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL, errno.EACCES, errno.EPERM}:
        return "unreachable"
    return "closed"
