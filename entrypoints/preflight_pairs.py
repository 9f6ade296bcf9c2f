"""Every pair of nodes over TCP: a short exchange, then a transfer on a port like the trainer's.

A question and its answer are one signed line each (`preflight_messages`), so that no node takes
the word of another job, or of another user, for its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import preflight_messages
from preflight_messages import LONGEST, QUESTION, Foreign, Record, Seal

Answer = Callable[[Record], Awaitable[Record]]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
T = TypeVar("T")

SLOW = 12.5e6
"""Bytes per second (100 Mbit/s) below which a transfer is repeated before it is believed."""

_BULK = 1 << 20
_BLOCK = 1 << 16
_LEAST = 1 << 14
"""Bytes that come where large packets pass at all."""
_SEGMENT = 536
"""Bytes of a TCP segment that any network carries: RFC 9293, section 3.7.1."""
_PORTS = 3
"""Ports that a node may listen on: one may be taken there."""
_TRIES = 3
_GONE = (OSError, EOFError, asyncio.CancelledError)
"""The other end has gone, or this test is over."""
_LISTENING = 10.0
"""Seconds for a question to come, once somebody has connected."""
_SPARE = 64
"""Connections at a time beside four for each node: who sends nothing must not take them all."""
_PATIENCE = 2.5
"""Seconds that a peer waits for more of a transfer before it says what has come."""
_PAUSE = 0.2


@dataclass(frozen=True)
class Course:
    """What every node knows before the test begins."""

    name: str
    """The run and its attempt."""
    node: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    """One for each node; empty where the host name means nothing here."""
    port: int
    """Where the nodes meet; each listens there for this test, on its own address."""
    seal: Seal
    held: socket.socket | None = None
    """The socket of `port`, where this node has it already."""

    @property
    def others(self) -> list[int]:
        """The other nodes; each begins with its neighbour, so that not all ask the same one."""
        count = len(self.hosts)
        return [(self.node + step) % count for step in range(1, count)]

    def who(self, node: int) -> str:
        """``node 2 (host, address)``."""
        host, address = self.hosts[node], self.addresses[node]
        where = host if host == address or not address else f"{host}, {address}"
        return f"node {node} ({where})"

    def ports(self, node: int) -> range:
        """Where `node` may listen: others of its own machine take those below."""
        first = self.port + self.addresses[:node].count(self.addresses[node])
        return range(first, first + _PORTS)

    def question(self, ask: str, **more: Any) -> Record:
        nonce = preflight_messages.nonce()
        return {"run": self.name, "ask": ask, "node": self.node, "nonce": nonce, **more}


class Server:
    """One node's end of the test: it greets, takes transfers, and hands on the other questions."""

    def __init__(self, course: Course, answer: Answer) -> None:
        self._course, self._answer = course, answer
        self._open: set[asyncio.Task[Any]] = set()
        self._servers: list[asyncio.Server] = []
        self._bulk = 0
        self.ignored = 0
        """Questions that no node of this job has asked."""

    async def start(self) -> None:
        """Listen. Raises OSError where none of the ports is free."""
        where = listening_address(self._course)
        data = await asyncio.start_server(self._serve(self._take), where, 0, limit=LONGEST)
        self._bulk = data.sockets[0].getsockname()[1]
        self._servers = [data, await self._listen(where)]

    async def _listen(self, where: str) -> asyncio.Server:
        answer = self._serve(self._hear)
        if self._course.held:  # listens from here on, also once it is torchrun's
            same = self._course.held.dup()
            return await asyncio.start_server(answer, sock=same, limit=LONGEST, backlog=1024)
        ports = self._course.ports(self._course.node)
        for port in ports:
            with contextlib.suppress(OSError):
                return await asyncio.start_server(
                    answer, where, port, limit=LONGEST, backlog=1024, reuse_address=True
                )
        raise OSError(errno.EADDRINUSE, f"TCP ports {ports[0]} to {ports[-1]} are taken")

    async def stop(self, patience: float) -> None:
        """Finish the answers that are under way, within `patience` seconds, and listen no more."""
        if self._open:
            await asyncio.wait(self._open, timeout=patience)
        for server in self._servers:
            server.close()

    def _serve(self, answer: Serve) -> Serve:
        """The handler of a connection: its question, if it is one of ours, and the answer."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - we are in one
            self._open.add(task)
            try:
                if len(self._open) > _SPARE + 4 * len(self._course.hosts):
                    raise Foreign("too many connections")
                await answer(reader, writer)
            except ValueError:  # Foreign, a line without end, no JSON
                self.ignored += 1
            except _GONE:
                pass
            finally:
                self._open.discard(task)
                writer.close()

        return handle

    async def _question(self, reader: asyncio.StreamReader) -> Record:
        """The question that came. Raises Foreign where no node of this job has asked it."""
        line = await _within(_LISTENING, _line(reader))
        question = self._course.seal.read(line, QUESTION)
        preflight_messages.check_question(question, len(self._course.hosts))
        if question["run"] != self._course.name:
            raise Foreign("another attempt")
        return question

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question = await self._question(reader)
        answer = await self._reply(question)
        purpose = preflight_messages.answers(question)
        await _send(writer, self._course.seal.write(answer, purpose))

    async def _reply(self, question: Record) -> Record:
        if question["ask"] == "hello":
            return {"node": self._course.node, "time": time.time(), "bulk": self._bulk}
        return await self._answer(question)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Agree to a transfer, then say how many bytes came in how many seconds."""
        question = await self._question(reader)
        purpose = preflight_messages.answers(question)
        await _send(writer, self._course.seal.write({}, purpose))
        await _send(writer, self._course.seal.write(await _count(reader), purpose))


def listening_address(course: Course) -> str:
    """All of this node's addresses, since others may know it by any, and each message is signed.

    Where all nodes are one machine, its own loopback address.
    """
    own = course.addresses[course.node]
    if len(course.hosts) == 1:
        return "127.0.0.1"
    if not own:
        return "0.0.0.0"  # noqa: S104 - the other nodes come from anywhere
    parsed = ipaddress.ip_address(own)
    if emulated(course):
        return own
    return "::" if parsed.version == 6 else "0.0.0.0"  # noqa: PLR2004, S104 - IPv6; as above


def emulated(course: Course) -> bool:
    """Whether all nodes are this one machine."""
    known = [address for address in course.addresses if address]
    return all(ipaddress.ip_address(address).is_loopback for address in known)


async def test(course: Course, deadline: float) -> dict[int, Record]:
    """The state of the link to each other node, by `deadline` (`time.monotonic`)."""
    wire = asyncio.Semaphore(1)  # one transfer after the other: each is to have the wire to itself
    found = await asyncio.gather(*(_link(course, n, deadline, wire) for n in course.others))
    return dict(zip(course.others, found, strict=True))


async def _link(course: Course, node: int, deadline: float, wire: asyncio.Semaphore) -> Record:
    link = await _greeted(course, node, deadline)
    if link["state"] == "ok":
        link.update(await _transferred(course, node, link["bulk"], deadline, wire))
    return link


async def ask(course: Course, node: int, port: int, question: Record, seconds: float) -> Record:
    """Put a question to a node.

    Raises OSError (TimeoutError is one), EOFError, or ValueError where another answers.
    """
    return await _within(seconds, _ask(course, course.addresses[node], port, question))


async def _ask(course: Course, address: str, port: int, question: Record) -> Record:
    reader, writer = await asyncio.open_connection(
        sock=await _small_segments(address, port), limit=LONGEST
    )
    try:
        await _send(writer, course.seal.write(question, QUESTION))
        return course.seal.read(await _line(reader), preflight_messages.answers(question))
    finally:
        writer.close()


async def _small_segments(address: str, port: int) -> socket.socket:
    """A connection that no wrong MTU can stop: words must arrive where large packets do not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
        await asyncio.get_running_loop().sock_connect(made, (address, port))
    except BaseException:
        made.close()
        raise
    return made


async def _greeted(course: Course, node: int, deadline: float) -> Record:
    """Greet `node` until it answers: it may still be starting."""
    if not course.addresses[node]:
        return {"state": "unknown"}
    ports = course.ports(node)
    last, attempt = {"state": "dropped", "port": ports[0]}, 0
    while (left := deadline - time.monotonic()) > 0:
        port = ports[attempt % _PORTS]
        asked, question = time.time(), course.question("hello")
        try:
            told = await ask(course, node, port, question, left)
            preflight_messages.check_greeting(told)
        except (OSError, EOFError, ValueError) as error:
            state = _state(error)
            if port == ports[0] and state != "dropped":  # which we begin with, and end with
                last = {"state": state, "port": port}
        else:
            if told.get("node") == node:
                return _greeting(told, port, asked)
            last = {"state": "other", "port": port, "answered": told.get("node")}
        attempt += 1
        await asyncio.sleep(min(_PAUSE, max(0.0, deadline - time.monotonic())))
    return last


def _greeting(told: Record, port: int, asked: float) -> Record:
    """What a greeting shows. `clock` is how far, in seconds, the peer's clock is ahead of ours."""
    answered = time.time()
    clock = told["time"] - (asked + answered) / 2
    seconds = answered - asked
    return {"state": "ok", "port": port, "bulk": told["bulk"], "seconds": seconds, "clock": clock}


async def _transferred(
    course: Course, node: int, port: int, deadline: float, wire: asyncio.Semaphore
) -> Record:
    """Send a mebibyte, again where it went ill: a busy machine looks like a bad link at times."""
    found: Record = {}
    for _ in range(_TRIES):
        one = await _transfer(course, node, port, deadline, wire)
        if one and one.get("rate", 0.0) >= found.get("rate", 0.0):
            found = one
        if found.get("state") not in {"slow", "stalled"}:
            break
    return found


async def _transfer(
    course: Course, node: int, port: int, deadline: float, wire: asyncio.Semaphore
) -> Record:
    """The rate, in bytes per second. Where no time is left, nothing is known, nor said."""
    if (left := deadline - time.monotonic()) < _PATIENCE:
        return {}
    stage = "ports"
    try:
        connection = asyncio.open_connection(course.addresses[node], port, limit=LONGEST)
        reader, writer = await _within(left, connection)
        stage = "stalled"
        try:
            async with wire:
                return await _bulk(course, reader, writer, deadline)
        finally:
            writer.transport.abort()
    except (OSError, EOFError, ValueError) as error:
        return {"state": stage, "bulk": port, "how": _state(error)}


async def _bulk(
    course: Course, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline: float
) -> Record:
    if deadline - time.monotonic() < _PATIENCE:
        return {}
    question = course.question("send")
    purpose = preflight_messages.answers(question)
    await _send(writer, course.seal.write(question, QUESTION))
    course.seal.read(await _within(3 * _PATIENCE, _line(reader)), purpose)
    writer.write(bytes(_BULK))
    told = course.seal.read(await _within(3 * _PATIENCE, _line(reader)), purpose)
    preflight_messages.check_count(told)
    if told["bytes"] < _LEAST:
        raise EOFError
    rate = told["bytes"] / max(told["seconds"], 1e-6)
    return {"state": "ok" if rate >= SLOW else "slow", "rate": rate}


async def _count(reader: asyncio.StreamReader) -> Record:
    """Bytes until all have come, or none comes any more, or it takes too long."""
    begun, got = time.monotonic(), 0
    while got < _BULK and (got < _LEAST or time.monotonic() < begun + _PATIENCE):
        try:
            block = await asyncio.wait_for(reader.read(_BLOCK), _PATIENCE)
        except asyncio.TimeoutError:  # noqa: UP041 - not TimeoutError in Python 3.10
            break
        if not block:
            break
        got += len(block)
    return {"bytes": got, "seconds": time.monotonic() - begun}


def _state(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "dropped"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    number = getattr(error, "errno", None)
    if number in {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL, errno.EACCES, errno.EPERM}:
        return "unreachable"
    return "closed"


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.wait_for` with one exception in all versions of Python: TimeoutError."""
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:  # noqa: UP041 - not TimeoutError in Python 3.10
        raise TimeoutError from None


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line:
        raise EOFError
    return line


async def _send(writer: asyncio.StreamWriter, line: bytes) -> None:
    writer.write(line)
    await writer.drain()
