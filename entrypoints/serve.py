"""Serve a package of `deploykit export` over HTTP: GET /ping, POST /invocations.

    python serve.py model --port 8080 --replicas 2

The requests are those of a SageMaker endpoint, so `boto3.client("sagemaker-runtime",
endpoint_url=...)` works as a client. This process only receives requests, so /ping always responds.
Each replica is a process with its own copy of the model that parses and answers requests, one at a
time or, with `--max-batch-size`, in batches of those that arrive within `--batch-timeout` or while
all replicas are busy. A request above the size limit or the concurrency limit is refused before it
is read. A replica that exceeds the time limit or ends is replaced. SIGTERM stops the server after
the requests in progress. Requires starlette and uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    sys.exit(
        f"serve.py: error: {error} in {sys.executable}; install it with `pip install "
        "'deploykit[serve]'`"
    )

from handler import JSON, Answer, Handler, Request

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
    """A process with a model. It answers one batch of requests at a time."""

    def __init__(self, package: Path, device: str, *, is_batched: bool) -> None:
        self._arguments = (package, device, is_batched)

    async def start(self) -> None:
        """Start the process and load the model. Raises ReplicaEndedError if that fails."""
        spawn = multiprocessing.get_context("spawn")
        self._connection, inner = spawn.Pipe()
        arguments = (inner, *self._arguments)
        self._process = spawn.Process(target=_replica, args=arguments, daemon=True)
        self._process.start()
        inner.close()
        self._thread = ThreadPoolExecutor(1)
        await self._in_thread(self._connection.recv)

    async def answers(self, requests: list[Request], seconds: float) -> list[Answer]:
        """Answer requests together within `seconds`, or else each alone within `seconds`.

        Raises ReplicaEndedError if the process ends, and asyncio.TimeoutError.
        """

        def exchange() -> list[Answer] | None:
            self._connection.send(requests)
            return self._receive()

        answers = await asyncio.wait_for(self._in_thread(exchange), seconds)
        if answers is None:
            alone = self._in_thread(self._receive)
            answers = await asyncio.wait_for(alone, seconds * len(requests))
        return answers or []

    def _receive(self) -> list[Answer] | None:
        """The answers; None if it could not answer together, and will answer one by one."""
        answers: list[Answer] | None = self._connection.recv()
        return answers

    async def _in_thread(self, function: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except (EOFError, OSError):
            raise ReplicaEndedError from None

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _replica(requests: Connection, package: Path, device: str, is_batched: bool) -> None:  # noqa: FBT001
    """Load the model, answer requests, and end with the server, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C goes to the server, which ends the replicas
    threading.Thread(target=_end_with_server, daemon=True).start()
    if device:
        os.environ["DEPLOYKIT_DEVICE"] = device
    handler = Handler(package, is_batched=is_batched)
    requests.send("ready")
    while True:
        requests.send(handler.answers(requests.recv(), lambda: requests.send(None)))


def _end_with_server() -> None:
    server = multiprocessing.parent_process()
    if server is not None:
        server.join()
        os._exit(1)


class Batch:
    """Requests that a replica will get together, and their answers."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.full = asyncio.Event()
        self._answers: list[asyncio.Future[Answer]] = []
        self._added: list[float] = []

    def add(self, request: Request) -> asyncio.Future[Answer]:
        """Add a request; returns its answer, for which to wait."""
        self.requests.append(request)
        self._added.append(time.monotonic())
        self._answers.append(asyncio.get_running_loop().create_future())
        return self._answers[-1]

    def finish(self, answers: list[Answer]) -> None:
        """Give each request its answer; one that was given up needs none."""
        for future, answer in zip(self._answers, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    def left(self, since: float, seconds: float) -> float:
        """The time left until its oldest request has waited for `seconds`, counted from `since`."""
        return max(0.0, max(self._added[0], since) + seconds - time.monotonic())

    def refuse_oldest(self, answer: Answer) -> None:
        """Give its oldest request an answer, and drop it."""
        future = self._answers.pop(0)
        if not future.done():
            future.set_result(answer)
        del self.requests[0], self._added[0]


class Service:
    """The replicas of a server, and the requests that they have."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        devices = options.device.split(",")
        count = options.replicas
        self._replicas = [
            Replica(
                options.package,
                devices[number % len(devices)],
                is_batched=options.max_batch_size > 1,
            )
            for number in range(count)
        ]
        self._idle: asyncio.Queue[Replica] = asyncio.Queue()
        self._requests = 0
        self._open: Batch | None = None
        """The batch that further requests join."""
        self._batches: set[asyncio.Task[None]] = set()
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
        for task in (*self._batches, *self._restarts):
            task.cancel()
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

    async def ping(self, _request: HttpRequest) -> Response:
        """Say whether a replica can answer."""
        return Response(status_code=503 if len(self._restarts) == len(self._replicas) else 200)

    async def invoke(self, request: HttpRequest) -> Response:
        """Answer a request by the next idle replica."""
        if self._requests >= self._options.concurrency:
            answer = refusal(
                503, f"{self._requests} requests are already in progress; try again later"
            )
        else:
            self._requests += 1
            try:
                answer = await self._answer(request)
            finally:
                self._requests -= 1
        headers = {"retry-after": "1"} if answer.status in {503, 504} else None
        return Response(answer.body, answer.status, headers, answer.content_type)

    async def _answer(self, request: HttpRequest) -> Answer:
        limit = self._options.max_body
        try:
            body = await asyncio.wait_for(read(request, limit), self._options.timeout)
        except TooLargeError:
            return refusal(413, f"the body is larger than {limit} bytes")
        except (asyncio.TimeoutError, ClientDisconnect):  # noqa: UP041 - Python 3.10
            return refusal(408, "timed out while receiving the body")
        headers = request.headers
        wanted = Request(body, headers.get("content-type", JSON), headers.get("accept", JSON))
        return await self._join(wanted)

    def _join(self, request: Request) -> asyncio.Future[Answer]:
        """Add a request to the open batch; returns its answer, for which to wait."""
        if self._open is None:
            self._open = Batch()
            task = asyncio.create_task(self._finish(self._open))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)
        batch = self._open
        answer = batch.add(request)
        if len(batch.requests) >= self._options.max_batch_size:
            self._close(batch)
        return answer

    def _close(self, batch: Batch) -> None:
        """Let further requests join another batch."""
        batch.full.set()
        if self._open is batch:
            self._open = None

    async def _finish(self, batch: Batch) -> None:
        """Let requests join a batch until its time is over and a replica idle; then answer them."""
        if not batch.full.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(batch.full.wait(), self._options.batch_timeout)
        since = time.monotonic()
        while batch.requests:
            try:
                replica = await asyncio.wait_for(
                    self._idle.get(), batch.left(since, self._options.timeout)
                )
            except asyncio.TimeoutError:  # noqa: UP041
                late = "no replica became idle in time; try again later"
                batch.refuse_oldest(refusal(503, late))
            else:
                self._close(batch)
                batch.finish(await self._answers_of(replica, batch.requests))
                return
        self._close(batch)

    async def _answers_of(self, replica: Replica, requests: list[Request]) -> list[Answer]:
        """The answers of a replica, which is then idle, or is replaced if it has none."""
        try:
            answers = await replica.answers(requests, self._options.timeout)
        except asyncio.TimeoutError:  # noqa: UP041
            self._restart(replica)
            answers = [refusal(504, f"no response within {self._options.timeout:g} s")] * len(
                requests
            )
        except ReplicaEndedError:
            self._restart(replica)
            crashed = refusal(500, "the replica crashed and is being replaced")
            answers = [crashed] * len(requests)
        else:
            self._idle.put_nowait(replica)
        return answers


async def read(request: HttpRequest, limit: int) -> bytes:
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
    parser.add_argument("--max-batch-size", type=int, default=1)
    parser.add_argument("--batch-timeout", type=float, default=0.01)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    threads = max(1, (os.cpu_count() or 1) // options.replicas)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    try:
        listening = socket.create_server((options.host, options.port), backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        sys.exit(
            f"serve.py: error: cannot listen on port {options.port} of {options.host}: {reason}"
            + ("; choose another --port, or 0 for any" if error.errno == errno.EADDRINUSE else "")
        )
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
        print(f"serve.py: error: cannot load the model of {options.package}", file=sys.stderr)
    return int(service.failed)


if __name__ == "__main__":
    main()
