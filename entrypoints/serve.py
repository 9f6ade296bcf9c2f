"""Serve a package of `deploykit export` over HTTP: GET /ping, POST /invocations.

    python serve.py model --port 8080 --replicas 2

The requests are those of a SageMaker endpoint, so `boto3.client("sagemaker-runtime",
endpoint_url=...)` is a client too. This process only receives: each replica is a process with its
own model that parses requests and answers them, one at a time, so /ping answers at any time. A
request that is too large or one too many is refused before it is read. A replica that exceeds the
time limit, or ends, is replaced. SIGTERM stops it after the requests underway. Requires starlette
and uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    sys.exit(f"serve.py: error: {error} in {sys.executable}: pip install 'deploykit[serve]'")

from handler import JSON, Answer, Handler

INTERRUPTED = 130
CONNECTIONS = 1000
"""Open connections, above which further ones get 503."""
STOPPING = 20
"""Seconds for requests underway after SIGTERM."""
T = TypeVar("T")


class TooLargeError(Exception):
    """A body is larger than the limit."""


class ReplicaEndedError(Exception):
    """The process of a replica has ended, or its model cannot be loaded."""


class Replica:
    """A process with a model. It answers one request at a time."""

    def __init__(self, package: Path, device: str) -> None:
        self._package = package
        self._device = device

    async def start(self) -> None:
        """Start the process and load the model. Raises ReplicaEndedError if that fails."""
        spawn = multiprocessing.get_context("spawn")
        self._connection, inner = spawn.Pipe()
        arguments = (inner, self._package, self._device)
        self._process = spawn.Process(target=_replica, args=arguments, daemon=True)
        self._process.start()
        inner.close()
        self._thread = ThreadPoolExecutor(1)
        await self._in_thread(self._connection.recv)

    async def answer(self, body: bytes, content_type: str, accept: str) -> Answer:
        """Answer a request. Raises ReplicaEndedError if the process ends."""

        def exchange() -> Answer:
            self._connection.send((body, content_type, accept))
            answer: Answer = self._connection.recv()
            return answer

        return await self._in_thread(exchange)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except (EOFError, OSError):
            raise ReplicaEndedError from None

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _replica(requests: Connection, package: Path, device: str) -> None:
    """Load the model, answer requests, and end with the server, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C goes to the server, which ends the replicas
    threading.Thread(target=_end_with_server, daemon=True).start()
    if device:
        os.environ["DEPLOYKIT_DEVICE"] = device
    handler = Handler(package)
    requests.send("ready")
    while True:
        requests.send(handler.answer(*requests.recv()))


def _end_with_server() -> None:
    server = multiprocessing.parent_process()
    if server is not None:
        server.join()
        os._exit(1)


class Service:
    """The replicas of a server, and the requests that they have."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        devices = options.device.split(",")
        count = options.replicas
        self._replicas = [
            Replica(options.package, devices[number % len(devices)]) for number in range(count)
        ]
        self._idle: asyncio.Queue[Replica] = asyncio.Queue()
        self._requests = 0
        self._restarts: set[asyncio.Task[None]] = set()
        self.failed = False

    def routes(self) -> list[Route]:
        """Return the paths of a SageMaker container, and that of a client of SageMaker."""
        return [
            Route("/ping", self.ping),
            Route("/invocations", self.invoke, methods=["POST"]),
            Route("/endpoints/{name}/invocations", self.invoke, methods=["POST"]),
        ]

    async def start(self) -> None:
        """Load all models. Raises ReplicaEndedError if one cannot be loaded."""
        await asyncio.gather(*(self._start(replica) for replica in self._replicas))

    def stop(self) -> None:
        """End all replicas."""
        for restart in self._restarts:
            restart.cancel()
        for replica in self._replicas:
            replica.stop()

    async def _start(self, replica: Replica) -> None:
        await replica.start()
        self._idle.put_nowait(replica)

    def _restart(self, replica: Replica) -> None:
        """Replace the process of a replica; if the model no longer loads, stop the server."""
        replica.stop()
        restart = asyncio.create_task(self._start(replica))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarted)

    def _restarted(self, restart: asyncio.Task[None]) -> None:
        self._restarts.discard(restart)
        if not restart.cancelled() and restart.exception() is not None:
            self.failed = True
            os.kill(os.getpid(), signal.SIGTERM)

    async def ping(self, _request: Request) -> Response:
        """Say whether a replica can answer."""
        return Response(status_code=503 if len(self._restarts) == len(self._replicas) else 200)

    async def invoke(self, request: Request) -> Response:
        """Answer a request by the next idle replica."""
        if self._requests >= self._options.concurrency:
            answer = refusal(503, f"{self._requests} requests are in progress: try again later")
        else:
            self._requests += 1
            try:
                answer = await self._answer(request)
            finally:
                self._requests -= 1
        headers = {"retry-after": "1"} if answer.status in {503, 504} else None
        return Response(answer.body, answer.status, headers, answer.content_type)

    async def _answer(self, request: Request) -> Answer:
        limit = self._options.max_body
        try:
            body = await asyncio.wait_for(read(request, limit), self._options.timeout)
        except TooLargeError:
            return refusal(413, f"the body is larger than {limit} bytes")
        except (asyncio.TimeoutError, ClientDisconnect):  # noqa: UP041 - Python 3.10
            return refusal(408, "the body did not arrive in time")
        try:
            replica = await asyncio.wait_for(self._idle.get(), self._options.timeout)
        except asyncio.TimeoutError:  # noqa: UP041
            return refusal(503, "no replica became idle in time: try again later")
        content_type = request.headers.get("content-type", JSON)
        answering = replica.answer(body, content_type, request.headers.get("accept", JSON))
        try:
            answer = await asyncio.wait_for(answering, self._options.timeout)
        except asyncio.TimeoutError:  # noqa: UP041
            self._restart(replica)
            return refusal(504, f"no answer within {self._options.timeout:g} s")
        except ReplicaEndedError:
            self._restart(replica)
            return refusal(500, "the replica crashed and is being replaced")
        self._idle.put_nowait(replica)
        return answer


async def read(request: Request, limit: int) -> bytes:
    """Read a body. Raises TooLargeError before more than `limit` bytes are read."""
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        raise TooLargeError
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise TooLargeError
    return bytes(body)


def refusal(status: int, sentence: str) -> Answer:
    """Return an answer that says why there is none."""
    return Answer(status, json.dumps({"error": sentence}).encode())


def main() -> None:
    """Run the command line; exits with 0 after SIGTERM, and 1 if the model cannot be served."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--device", default="")
    parser.add_argument("--max-body", type=int, default=64 * 2**20)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    threads = max(1, (os.cpu_count() or 1) // options.replicas)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    try:
        listening = socket.create_server((options.host, options.port), backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        sys.exit(f"serve.py: error: port {options.port} of {options.host}: {reason}")
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(asyncio.run(serve(options, listening)))
    sys.exit(INTERRUPTED)


async def serve(options: argparse.Namespace, listening: socket.socket) -> int:
    """Load the models, answer requests until a signal comes, and return an exit code."""
    # asyncio sets it only on sockets that name their protocol; connections inherit it
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    service = Service(options)
    try:
        await service.start()
        host, port = listening.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        ready = {"url": url, "package": str(options.package), "pid": os.getpid()}
        text = f"{url}: POST /invocations, GET /ping; stop it with ^C or SIGTERM"
        print(json.dumps(ready) if options.json else text, flush=True)
        # uvicorn handles these while it serves, and raises them again at its end
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        config = uvicorn.Config(
            Starlette(routes=service.routes()),
            access_log=False,
            lifespan="off",
            limit_concurrency=CONNECTIONS,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=STOPPING,
        )
        await uvicorn.Server(config).serve(sockets=[listening])
    except ReplicaEndedError:
        service.failed = True
    finally:
        service.stop()
    if service.failed:
        print(f"serve.py: error: the model of {options.package} cannot be loaded", file=sys.stderr)
    return int(service.failed)


if __name__ == "__main__":
    main()
