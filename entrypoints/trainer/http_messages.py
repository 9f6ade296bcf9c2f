"""HTTP/1.1 on one connection: reads requests and sends JSON responses, within limits.

Parsing is strict: digits only in Content-Length, no chunked bodies, no folded headers. An invalid
request ends the connection, because the start of the next one is unknown.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")

BLOCK_BYTES = 2**16
"""Bytes of a body that are read at once."""
_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) (/[!-~]*) HTTP/([0-9])\.([0-9])\r?\n")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)\r?\n")
_CONTENT_LENGTH = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class Limits:
    """Limits of a server; requests beyond them get an error response."""

    connections: int = 256
    head_bytes: int = 2**14
    """Request line and headers."""
    body_bytes: int = 6 * 2**20
    """SageMaker real-time endpoints accept 6 MB."""
    buffered_bytes: int = 2**26
    """Bodies and responses of all requests in progress."""
    threads: int = 4
    """Requests that are answered at the same time."""
    queued: int = 32
    """Requests that wait for a thread."""
    head_seconds: float = 10
    """Time to send the first request line and the headers of each request."""
    body_seconds: float = 30
    """Time to send a body, and to receive a response."""
    idle_seconds: float = 75
    """Time between two requests on a connection."""
    linger_seconds: float = 2
    """Time in which unread data is discarded after an error, so that the client can read it."""


class HTTPError(Exception):
    """An error response: its status, a message for the client, and additional headers."""

    def __init__(self, status: HTTPStatus, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class Request(NamedTuple):
    """A complete request."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """With names in lower case."""
    last: bool
    """Whether the connection ends with the response."""
    body: bytes = b""


@dataclass
class MemoryBudget:
    """The bytes that all requests in progress may occupy together."""

    limit: int
    used: int = 0

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes. Raises HTTPError if they exceed the limit."""
        if self.used + size > self.limit:
            raise HTTPError(HTTPStatus.SERVICE_UNAVAILABLE, "server is busy", retry_after="1")
        self.used += size


@dataclass
class Connection:
    """A client's connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    limits: Limits
    budget: MemoryBudget
    reserved: int = field(default=0, init=False)
    """Bytes of the budget that this connection has reserved."""
    _requests: int = field(default=0, init=False)

    async def receive(self) -> Request | None:
        """The next request, or None if the client has closed the connection or is idle.

        Raises HTTPError for an invalid request; the connection must end then.
        """
        limits, first = self.limits, self._requests == 0
        self._requests += 1
        try:
            start = await _within(
                limits.head_seconds if first else limits.idle_seconds, self.reader.read(1)
            )
        except HTTPError:
            if first:
                raise
            return None
        if not start:
            return None
        request = await _within(limits.head_seconds, self._head(start))
        size = self._body_size(request)
        if not size:
            return request
        if request.headers.get("expect", "").lower() == "100-continue":
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return request._replace(body=await _within(limits.body_seconds, self._body(size)))

    async def send(
        self, status: HTTPStatus, content: Any, headers: Mapping[str, str], request: Request | None
    ) -> None:
        """Send a JSON response and wait until the client has received it.

        `request` is None if the request was invalid. Errors are logged to standard error.
        """
        body = json.dumps(content, allow_nan=False).encode()
        if len(body) > BLOCK_BYTES:
            self.reserve(len(body))
        lines = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **{name.replace("_", "-").title(): value for name, value in headers.items()},
            **({} if request and not request.last else {"Connection": "close"}),
        }
        if status >= HTTPStatus.BAD_REQUEST:
            what = f"{request.method} {request.path}"[:200] if request else "invalid request"
            print(f"{what}: {status.value} {content.get('error')}", file=sys.stderr, flush=True)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.writer.write(f"{head}\r\n".encode())
        if not request or request.method != "HEAD":
            self.writer.write(body)
        await _within(self.limits.body_seconds, self.writer.drain())

    async def linger(self) -> None:
        """Close the sending side, and discard incoming data for a short time.

        If a connection with unread data is closed at once, it is reset, and the client loses the
        response.
        """
        with suppress(HTTPError, OSError):
            self.writer.write_eof()
            await _within(self.limits.linger_seconds, self._discard())

    def reserve(self, size: int) -> None:
        """Reserve memory for this request. Raises HTTPError if the budget is exhausted."""
        self.budget.reserve(size)
        self.reserved += size

    def release(self) -> None:
        """Release the memory that the last request has reserved."""
        self.budget.used -= self.reserved
        self.reserved = 0

    async def _discard(self) -> None:
        while await self.reader.read(BLOCK_BYTES):
            pass

    async def _head(self, start: bytes) -> Request:
        """Read the request line, of which `start` has been read, and the headers."""
        if not (start.isalpha() or start in b"\r\n"):
            raise _bad_request("not an HTTP request")
        line = start + await self._line() if start != b"\n" else start
        if line in (b"\r\n", b"\n"):  # one empty line before a request is allowed
            line = await self._line()
        match = _REQUEST_LINE.fullmatch(line)
        if match is None:
            raise _bad_request("invalid request line")
        method, target, major, minor = match.groups()
        if major != b"1":
            raise HTTPError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "use HTTP/1.1")
        headers = await self._headers(self.limits.head_bytes - len(line))
        options = [word.strip() for word in headers.get("connection", "").lower().split(",")]
        last = minor == b"0" or "close" in options
        return Request(method.decode(), target.decode().partition("?")[0], headers, last)

    async def _headers(self, max_bytes: int) -> dict[str, str]:
        headers: dict[str, str] = {}
        while (line := await self._line()) not in (b"\r\n", b"\n"):
            max_bytes -= len(line)
            if max_bytes < 0:
                raise _head_too_large()
            match = _HEADER.fullmatch(line)
            if match is None:
                raise _bad_request("invalid header")
            name, value = match[1].decode().lower(), match[2].decode("latin-1").strip(" \t")
            if headers.setdefault(name, value) != value and name == "content-length":
                raise _bad_request("two different Content-Length headers")
        return headers

    async def _line(self) -> bytes:
        try:
            line = await self.reader.readline()
        except ValueError:
            raise _head_too_large() from None
        if not line.endswith(b"\n"):
            raise _bad_request("incomplete request")
        return line

    def _body_size(self, request: Request) -> int:
        """The size of the request's body, in bytes."""
        length = request.headers.get("content-length")
        if "transfer-encoding" in request.headers:
            raise HTTPError(
                HTTPStatus.LENGTH_REQUIRED, "send a Content-Length, not a Transfer-Encoding"
            )
        if length is None:
            if request.method not in ("GET", "HEAD"):
                raise HTTPError(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
            return 0
        if not _CONTENT_LENGTH.fullmatch(length):
            raise _bad_request("invalid Content-Length")
        if int(length) > self.limits.body_bytes:
            raise HTTPError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body exceeds {self.limits.body_bytes} bytes",
            )
        return int(length)

    async def _body(self, size: int) -> bytes:
        """Read the body in blocks: data that is announced but never sent takes no memory."""
        body = bytearray()
        while len(body) < size:
            block = await self.reader.read(min(BLOCK_BYTES, size - len(body)))
            if not block:
                raise _bad_request("incomplete request")
            self.reserve(len(block))
            body += block
        return bytes(body)


async def _within(seconds: float, awaitable: Awaitable[Result]) -> Result:
    """Wait for a result. Raises HTTPError after `seconds`."""
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
        message = f"timed out after {seconds:.9g} s"
        raise HTTPError(HTTPStatus.REQUEST_TIMEOUT, message) from None


def _bad_request(message: str) -> HTTPError:
    return HTTPError(HTTPStatus.BAD_REQUEST, message)


def _head_too_large() -> HTTPError:
    return HTTPError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are too large")
