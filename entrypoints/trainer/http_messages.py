"""HTTP/1.1 on one connection: a request in, an answer in JSON out, within limits.

What is read strictly: a length in digits, no body in chunks, no folded header. Whatever is refused
here ends the connection, since nobody can tell where the next request would begin.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

PIECE = 2**16
"""Bytes of a body read at once."""
_LINE = re.compile(rb"([A-Z]{1,20}) (/[!-~]*) HTTP/([0-9])\.([0-9])\r?\n")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)\r?\n")
_LENGTH = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class Limits:
    """What one server takes on; more is answered with an error."""

    connections: int = 256
    head_bytes: int = 2**14
    """Of a request's first line and its headers."""
    body_bytes: int = 6 * 2**20
    """SageMaker lets 6 MB through to a real-time endpoint."""
    held_bytes: int = 2**26
    """Of the bodies and answers of all requests under way."""
    threads: int = 4
    waiting: int = 32
    """Requests for which there is no thread yet."""
    head_seconds: float = 10
    body_seconds: float = 30
    """To send a body, and to take an answer."""
    idle_seconds: float = 75
    """Between two requests of a connection."""
    linger_seconds: float = 2
    """In which what a client still sends is thrown away, so that it gets to read the answer."""


class HTTPError(Exception):
    """An answer that is no success: why, in words for whoever sent the request."""

    def __init__(self, status: HTTPStatus, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status = status
        self.headers = headers


class Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    last: bool
    """Whether the connection ends with the answer."""
    body: bytes = b""


@dataclass
class Held:
    """The bytes that all requests under way hold together."""

    most: int
    now: int = 0

    def add(self, size: int) -> None:
        if self.now + size > self.most:
            raise HTTPError(HTTPStatus.SERVICE_UNAVAILABLE, "too much under way", retry_after="1")
        self.now += size


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    limits: Limits
    held: Held
    mine: int = field(default=0, init=False)
    """Of the bytes held, those of this connection."""
    _requests: int = field(default=0, init=False)

    async def receive(self) -> Request | None:
        """The next request, or None where the client has left or has nothing more to ask.

        Raises HTTPError for one that cannot be answered; the connection must end then.
        """
        limits, first = self.limits, self._requests == 0
        self._requests += 1
        try:
            begin = await _within(
                limits.head_seconds if first else limits.idle_seconds, self.reader.read(1)
            )
        except HTTPError:
            if first:
                raise
            return None
        if not begin:
            return None
        request = await _within(limits.head_seconds, self._head(begin))
        size = self._size(request)
        if not size:
            return request
        if request.headers.get("expect", "").lower() == "100-continue":
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return request._replace(body=await _within(limits.body_seconds, self._body(size)))

    async def send(
        self, status: HTTPStatus, content: Any, headers: Mapping[str, str], request: Request | None
    ) -> None:
        """Answer `request`; None stands for one that was refused. Returns once it is taken."""
        body = json.dumps(content, allow_nan=False).encode()
        if len(body) > PIECE:
            self.hold(len(body))
        lines = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **{name.replace("_", "-").title(): value for name, value in headers.items()},
            **({} if request and not request.last else {"Connection": "close"}),
        }
        if status >= HTTPStatus.BAD_REQUEST:
            what = f"{request.method} {request.path}"[:200] if request else "a request"
            print(f"{what}: {status.value} {content.get('error')}", file=sys.stderr, flush=True)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.writer.write(f"{head}\r\n".encode())
        if not request or request.method != "HEAD":
            self.writer.write(body)
        await _within(self.limits.body_seconds, self.writer.drain())

    async def linger(self) -> None:
        """End what we send, and throw away what still comes for a short while.

        Closed at once, a connection with unread bytes is reset, and takes our answer with it.
        """
        with suppress(HTTPError, OSError):
            self.writer.write_eof()
            await _within(self.limits.linger_seconds, self._discard())

    def release(self) -> None:
        """Let go of the bytes of the last request."""
        self.held.now -= self.mine
        self.mine = 0

    def hold(self, size: int) -> None:
        """Count bytes of this request. Raises HTTPError where there are too many."""
        self.held.add(size)
        self.mine += size

    async def _discard(self) -> None:
        while await self.reader.read(PIECE):
            pass

    async def _head(self, begin: bytes) -> Request:
        if not (begin.isalpha() or begin in b"\r\n"):
            raise _bad("this is not HTTP")
        line = begin + await self._line() if begin != b"\n" else begin
        if line in (b"\r\n", b"\n"):  # one empty line before a request is allowed
            line = await self._line()
        found = _LINE.fullmatch(line)
        if found is None:
            raise _bad("the first line is no request")
        if found[3] != b"1":
            raise HTTPError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "speak HTTP/1.1")
        headers = await self._headers(self.limits.head_bytes - len(line))
        words = [word.strip() for word in headers.get("connection", "").lower().split(",")]
        last = found[4] == b"0" or "close" in words
        path = found[2].decode().partition("?")[0]
        return Request(found[1].decode(), path, headers, last)

    async def _headers(self, left: int) -> dict[str, str]:
        headers: dict[str, str] = {}
        while (line := await self._line()) not in (b"\r\n", b"\n"):
            left -= len(line)
            if left < 0:
                raise _too_long()
            found = _HEADER.fullmatch(line)
            if found is None:
                raise _bad("a header cannot be read")
            name, value = found[1].decode().lower(), found[2].decode("latin-1").strip(" \t")
            if headers.setdefault(name, value) != value and name == "content-length":
                raise _bad("there are two lengths")
        return headers

    async def _line(self) -> bytes:
        try:
            line = await self.reader.readline()
        except ValueError:
            raise _too_long() from None
        if not line.endswith(b"\n"):
            raise _bad("the request ends in the middle")
        return line

    def _size(self, request: Request) -> int:
        """Bytes of the body that follows."""
        length = request.headers.get("content-length")
        if "transfer-encoding" in request.headers:
            raise HTTPError(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length, not chunks")
        if length is None:
            if request.method not in ("GET", "HEAD"):
                raise HTTPError(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
            return 0
        if not _LENGTH.fullmatch(length):
            raise _bad("the Content-Length is no number of bytes")
        if int(length) > self.limits.body_bytes:
            raise HTTPError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {self.limits.body_bytes} bytes"
            )
        return int(length)

    async def _body(self, size: int) -> bytes:
        """Read as it comes: what is announced and never sent takes no memory."""
        body = bytearray()
        while len(body) < size:
            piece = await self.reader.read(min(PIECE, size - len(body)))
            if not piece:
                raise _bad("the request ends in the middle")
            self.hold(len(piece))
            body += piece
        return bytes(body)


async def _within(seconds: float, awaited: Any) -> Any:
    try:
        return await asyncio.wait_for(awaited, seconds)
    except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
        why = f"not sent within {seconds:.9g} s"
        raise HTTPError(HTTPStatus.REQUEST_TIMEOUT, why) from None


def _bad(why: str) -> HTTPError:
    return HTTPError(HTTPStatus.BAD_REQUEST, why)


def _too_long() -> HTTPError:
    return HTTPError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are too long")
