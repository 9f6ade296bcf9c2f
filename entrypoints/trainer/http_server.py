"""An HTTP server for JSON that resists hostile clients.

One thread handles all connections and only moves bytes, so that an idle connection costs a timer;
POST requests are answered in worker threads. When there are too many connections, the one that has
waited longest for its client is closed, so that a health check always gets through.
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

from trainer.http_messages import Connection, HTTPError, Limits, MemoryBudget, Request

Handler = Callable[[Request], dict[str, Any]]
"""Answers a request with JSON content; may raise HTTPError."""
Routes = Mapping[str, tuple[str, Handler]]
"""By path: the only method that is allowed, and its handler."""
ACCEPT_RETRY_SECONDS = 0.1
"""Pause after the system has refused to accept a connection."""


class Server:
    """A server that is bound to its address; port 0 means any free one.

    Raises OSError if the address is not available.
    """

    def __init__(self, host: str, port: int, routes: Routes, limits: Limits | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self.server_port: int = self._socket.getsockname()[1]
        self._routes, self._limits = routes, limits or Limits()
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_connections = min(self._limits.connections, open_files // 2)
        self._budget = MemoryBudget(self._limits.buffered_bytes)
        self._tasks: set[asyncio.Task[Any]] = set()
        """One per connection."""
        self._waiting: dict[asyncio.Task[Any], None] = {}
        """Those that wait for their client, longest first."""
        self._in_progress = 0
        """Requests that are answered by a thread or wait for one."""
        self._shutdown_requested = False
        self._stopped = threading.Event()
        self._stopped.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve_forever(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until `shutdown` is called, or SIGTERM or SIGINT arrives in the main thread.

        Calls `started` once these signals are handled.
        """
        self._stopped.clear()
        try:
            with ThreadPoolExecutor(self._limits.threads) as self._pool:
                asyncio.run(self._serve(started))
        finally:
            self._stopped.set()

    def shutdown(self) -> None:
        """Stop `serve_forever`, which runs in another thread, and wait until it has returned."""
        self._shutdown_requested = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop.set)
        self._stopped.wait()

    def server_close(self) -> None:
        """Close the listening socket."""
        self._socket.close()

    async def _serve(self, started: Callable[[], None]) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stop.set)
        accepting = self._loop.create_task(self._accept(self._loop))
        started()
        if not self._shutdown_requested:
            await self._stop.wait()
        accepting.cancel()
        for task in self._waiting:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._limits.body_seconds)

    async def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        """Accept connections while there is room, so that file descriptors never run out."""
        self._socket.setblocking(False)
        while True:
            while len(self._tasks) >= self._max_connections:
                longest_waiting = next(iter(self._waiting), None)
                if longest_waiting is not None:
                    longest_waiting.cancel()
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            try:
                client, _ = await loop.sock_accept(self._socket)
            except OSError:  # the client has left, or other processes use all descriptors
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            task = loop.create_task(self._handle_connection(client))
            self._tasks.add(task)
            self._waiting[task] = None

    async def _handle_connection(self, client: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - see `_accept`
        reader, writer = await asyncio.open_connection(sock=client, limit=self._limits.head_bytes)
        connection = Connection(reader, writer, self._limits, self._budget)
        try:
            while await self._exchange(connection, task):
                connection.release()
        except (OSError, HTTPError, asyncio.CancelledError):
            # the client has left, did not receive the response, or was closed to make room
            writer.transport.abort()
        finally:
            connection.release()
            self._tasks.discard(task)
            self._waiting.pop(task, None)
            writer.close()

    async def _exchange(self, connection: Connection, task: asyncio.Task[Any]) -> bool:
        """Receive a request and send its response; returns whether another one may follow."""
        self._waiting.pop(task, None)
        self._waiting[task] = None  # at the end: it has just started to wait
        try:
            request = await connection.receive()
        except HTTPError as error:
            await connection.send(error.status, {"error": str(error)}, error.headers, None)
            await connection.linger()
            return False
        if request is None:
            return False
        status, headers = HTTPStatus.OK, dict[str, str]()
        try:
            content = await self._respond(request, task)
        except HTTPError as error:
            status, content, headers = error.status, {"error": str(error)}, error.headers
        await connection.send(status, content, headers, request)
        return not request.last

    async def _respond(self, request: Request, task: asyncio.Task[Any]) -> dict[str, Any]:
        """The content of the response. Raises HTTPError."""
        route = self._routes.get(request.path)
        if route is None:
            known = ", ".join(f"{method} {path}" for path, (method, _) in self._routes.items())
            raise HTTPError(HTTPStatus.NOT_FOUND, f"unknown path; this server has {known}")
        method, handler = route
        if request.method.replace("HEAD", "GET") != method:
            raise HTTPError(HTTPStatus.METHOD_NOT_ALLOWED, f"use {method}", allow=method)
        if method == "GET":
            return handler(request)
        if self._in_progress >= self._limits.threads + self._limits.queued:
            raise HTTPError(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests", retry_after="1")
        self._waiting.pop(task, None)
        self._in_progress += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, _call, handler, request
            )
        finally:
            self._in_progress -= 1
            self._waiting[task] = None


def _call(handler: Handler, request: Request) -> dict[str, Any]:
    """Call `handler`; an unexpected error is logged, and the client learns nothing about it."""
    try:
        return handler(request)
    except HTTPError:
        raise
    except Exception as error:  # noqa: BLE001 - a request must not end the server
        print(f"error: {type(error).__name__}: {ascii(str(error))[:500]}", file=sys.stderr)
        raise HTTPError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error") from None


def read_json(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request. Raises HTTPError for anything else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the Content-Type must be application/json"
        )
    try:
        content = json.loads(request.body, parse_constant=_refuse_constant)
    except RecursionError:
        raise HTTPError(HTTPStatus.BAD_REQUEST, "the JSON is nested too deeply") from None
    except ValueError as error:
        raise HTTPError(HTTPStatus.BAD_REQUEST, f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise HTTPError(HTTPStatus.BAD_REQUEST, "send a JSON object")
    return content


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")
