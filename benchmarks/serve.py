"""Requests a second and latency of `deploykit deploy`, beside a bare starlette app with the model.

    .venv/bin/python benchmarks/serve.py MODEL

MODEL is a package of the digits. The peer is what one would write by hand: one process of uvicorn
whose endpoint parses the request, calls the model and writes the answer. Both get the same requests
over kept connections; the ratio is of CPU time for a request, with the replicas. Then a request of
50 MB is sent to each, and /ping is asked meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SERVE = Path(__file__).resolve().parent.parent / "entrypoints/serve.py"
BARE = """
import sys, uvicorn
sys.path.insert(0, sys.argv[1] + "/code")
import inference
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

model = inference.model_fn(sys.argv[1])

async def ping(request):
    return Response()

async def invoke(request):
    inputs = inference.input_fn(await request.body(), "application/json")
    body, kind = inference.output_fn(inference.predict_fn(inputs, model), "application/json")
    return Response(body, media_type=kind)

app = Starlette(routes=[Route("/ping", ping), Route("/invocations", invoke, methods=["POST"])])
uvicorn.run(app, port=int(sys.argv[2]), access_log=False, log_level="warning")
"""
IMAGE = [[[0.5] * 8] * 8]
HEADERS = {"content-type": "application/json"}


def main() -> None:
    """Measure both, one after the other, and print a line for each and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    cost = {}
    with tempfile.TemporaryDirectory() as scratch:
        bare = Path(scratch, "bare.py")
        bare.write_text(BARE)
        model = str(options.model)
        ours = [str(SERVE), model, "--port"]
        servers = {
            "bare": (8391, [str(bare), model, "8391"]),
            "deploykit": (8392, [*ours, "8392"]),
            "deploykit, 2 replicas": (8393, [*ours, "8393", "--replicas", "2"]),
        }
        for name, (port, argv) in servers.items():
            with running(argv, port) as pid:
                before = cpu_seconds(pid)
                times = load(port, options.clients, options.seconds)
                cost[name] = (cpu_seconds(pid) - before) / len(times)
                slowest = statistics.quantiles(times, n=100)[98]
                health = pings_during_large_request(port)
                print(
                    f"{name}: {len(times) / options.seconds:.0f} requests/s, "
                    f"{1000 * cost[name]:.2f} ms CPU for each, p50 "
                    f"{1000 * statistics.median(times):.1f} ms, p99 {1000 * slowest:.1f} ms; "
                    f"slowest /ping during a request of 50 MB: {1000 * max(health):.0f} ms "
                    f"({len(health)} pings)",
                    flush=True,
                )
    print(f"CPU for a request, deploykit / bare: {cost['deploykit'] / cost['bare']:.2f}")


@contextlib.contextmanager
def running(argv: list[str], port: int) -> Iterator[int]:
    """Start a server with one thread for each model, wait until it answers, and give its id."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *argv], env=env, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                if request(port, "GET", "/ping") == http.HTTPStatus.OK:
                    break
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(pid: int) -> float:
    """The CPU time so far of a process and its children (proc(5), stat: fields 4, 14 and 15)."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if pid in {int(path.parent.name), int(fields[1])}:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def request(port: int, method: str, path: str, body: bytes | None = None) -> int:
    """The status of one request on a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    with contextlib.closing(connection):
        connection.request(method, path, body, HEADERS)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def load(port: int, clients: int, seconds: float) -> list[float]:
    """The seconds that each request took, of several clients at once."""
    body = json.dumps({"inputs": [IMAGE]}).encode()
    times: list[float] = []
    end = time.monotonic() + seconds

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        while time.monotonic() < end:
            start = time.monotonic()
            connection.request("POST", "/invocations", body, HEADERS)
            answer = connection.getresponse()
            answer.read()
            if answer.status != http.HTTPStatus.OK:
                sys.exit(f"status {answer.status}")
            times.append(time.monotonic() - start)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def pings_during_large_request(port: int) -> list[float]:
    """The seconds that each /ping took while 50 MB were sent, parsed and answered."""
    body = json.dumps({"inputs": [[[[0.1234567890123456] * 8] * 8]] * 39_000}).encode()
    large = threading.Thread(target=request, args=(port, "POST", "/invocations", body))
    large.start()
    times = []
    while large.is_alive():
        start = time.monotonic()
        request(port, "GET", "/ping")
        times.append(time.monotonic() - start)
        time.sleep(0.01)
    return times


if __name__ == "__main__":
    main()
