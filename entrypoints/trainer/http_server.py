"""A server for answers in JSON that a hostile client can neither stop nor fill.

All connections share one thread, which only moves bytes, so an idle one costs a timer; answers are
made in others. Where there are too many connections, the one that has kept us waiting for longest
goes: a health check always gets through.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from trainer.http_messages import Connection, Held, HTTPError, Limits, Request

Answer = Callable[[Request], dict[str, Any]]
Routes = Mapping[str, tuple[str, Answer]]
"""By path: the one method that it takes, and what answers it. An answer may raise HTTPError."""
PAUSE = 0.1
"""Seconds before another try where the system gives no connection."""


class Server:
    """Bound to its address once made; it answers in `serve_forever`, until `shutdown`.

    Port 0 means any free one. Raises OSError where the address is not to be had.
    """

    def __init__(self, host: str, port: int, routes: Routes, limits: Limits | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self.server_port: int = self._socket.getsockname()[1]
        self._routes, self._limits = routes, limits or Limits()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(self._limits.connections, files // 2)
        self._held = Held(self._limits.held_bytes)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: dict[asyncio.Task[Any], None] = {}
        """Connections that wait for their client, longest first."""
        self._working = 0
        self._told = False
        self._ended = threading.Event()
        self._ended.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve_forever(self) -> None:
        """Answer until told to stop: by `shutdown`, SIGTERM or SIGINT."""
        self._ended.clear()
        try:
            with ThreadPoolExecutor(self._limits.threads) as self._pool:
                asyncio.run(self._serve())
        finally:
            self._ended.set()

    def shutdown(self) -> None:
        """Have `serve_forever` return, from another thread, and wait until it has."""
        self._told = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        self._ended.wait()

    def server_close(self) -> None:
        self._socket.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stop.set)
        accepting = self._loop.create_task(self._accept(self._loop))
        if not self._told:
            await self._stop.wait()
        accepting.cancel()
        for task in self._waiting:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._limits.body_seconds)

    async def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take connections one by one, and only where there is room: so files never run out."""
        self._socket.setblocking(False)
        while True:
            while len(self._tasks) >= self._most:
                oldest = next(iter(self._waiting), None)
                if oldest is not None:
                    oldest.cancel()
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            try:
                client, _ = await loop.sock_accept(self._socket)
            except OSError:  # it has left, or others have taken all files
                await asyncio.sleep(PAUSE)
                continue
            task = loop.create_task(self._connected(client))
            self._tasks.add(task)
            self._waiting[task] = None

    async def _connected(self, client: socket.socket) -> None:
        task = asyncio.current_task()
        reader, writer = await asyncio.open_connection(sock=client, limit=self._limits.head_bytes)
        connection = Connection(reader, writer, self._limits, self._held)
        try:
            while await self._exchange(connection, task):
                connection.release()
        except (OSError, HTTPError, asyncio.CancelledError):
            writer.transport.abort()  # it has left, takes no answer, or had to make room
        finally:
            connection.release()
            self._tasks.discard(task)
            self._waiting.pop(task, None)
            writer.close()

    async def _exchange(self, connection: Connection, task: asyncio.Task[Any]) -> bool:
        """One request and its answer; whether there may be another one."""
        self._waiting.pop(task, None)
        self._waiting[task] = None  # the last to go
        try:
            request = await connection.receive()
        except HTTPError as error:
            await connection.send(error.status, {"error": str(error)}, error.headers, None)
            await connection.linger()
            return False
        if request is None:
            return False
        status, headers = HTTPStatus.OK, {}
        try:
            content = await self._answer(request, task)
        except HTTPError as error:
            status, content, headers = error.status, {"error": str(error)}, error.headers
        await connection.send(status, content, headers, request)
        return not request.last

    async def _answer(self, request: Request, task: asyncio.Task[Any]) -> dict[str, Any]:
        route = self._routes.get(request.path)
        if route is None:
            known = ", ".join(f"{method} {path}" for path, (method, _) in self._routes.items())
            raise HTTPError(HTTPStatus.NOT_FOUND, f"there is only {known}")
        method, answer = route
        if request.method.replace("HEAD", "GET") != method:
            raise HTTPError(HTTPStatus.METHOD_NOT_ALLOWED, f"send {method}", allow=method)
        if method == "GET":
            return answer(request)
        if self._working >= self._limits.threads + self._limits.waiting:
            raise HTTPError(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests", retry_after="1")
        self._waiting.pop(task, None)
        self._working += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, _made, answer, request
            )
        finally:
            self._working -= 1
            self._waiting[task] = None


def _made(answer: Answer, request: Request) -> dict[str, Any]:
    """What `answer` gives; what it did not expect is an error of ours, and told to nobody else."""
    try:
        return answer(request)
    except HTTPError:
        raise
    except Exception as error:  # noqa: BLE001 - a request must never end a server
        print(f"error: {type(error).__name__}: {ascii(str(error))[:500]}", file=sys.stderr)
        raise HTTPError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error") from None


def read_json(request: Request) -> dict[str, Any]:
    """The JSON object in a request. Raises HTTPError for anything else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")
    try:
        content = json.loads(request.body, parse_constant=_no_constant)
    except RecursionError:
        raise HTTPError(HTTPStatus.BAD_REQUEST, "this is nested too deeply") from None
    except ValueError as error:
        raise HTTPError(HTTPStatus.BAD_REQUEST, f"this is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise HTTPError(HTTPStatus.BAD_REQUEST, "send a JSON object")
    return content


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no number")
