"""Requests a second and latency of `deploykit deploy`, beside LitServe and a bare starlette app.

    .venv/bin/python benchmarks/serve.py MODEL --litserve LITSERVE/bin/python

MODEL is a package of the digits. The bare app is what one would write by hand: one process of
uvicorn whose endpoint parses the request, calls the model and writes the answer. LITSERVE is an
environment with PyTorch, safetensors, numpy and `pip install litserve`, and without `mcp` 2, beside
which version 0.2.19 does not start. All get the same requests over kept connections, in turns; the
table has the medians of the rounds, and `cpu` is the CPU time for a request beside the bare app's.
Then a request of 50 MB is sent to each, and /ping is asked meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
LITSERVE = """
import sys
import litserve
import torch

sys.path.insert(0, sys.argv[1] + "/code")
import inference

class Digits(litserve.LitAPI):
    def setup(self, device):
        self.model = inference.model_fn(sys.argv[1])

    def decode_request(self, request):
        return inference._tensor("", request["inputs"])

    def batch(self, inputs):
        self.sizes = [len(each) for each in inputs]
        return torch.cat(inputs)

    def predict(self, inputs):
        return inference.predict_fn(inputs, self.model)

    def unbatch(self, outputs):
        return outputs.split(self.sizes)

    def encode_response(self, outputs):
        return {"outputs": outputs.tolist()}

if __name__ == "__main__":
    batches = {"max_batch_size": int(sys.argv[3]), "batch_timeout": 0.01}
    api = Digits(api_path="/invocations", **(batches if int(sys.argv[3]) > 1 else {}))
    server = litserve.LitServer(api, accelerator="cpu", healthcheck_path="/ping", timeout=300)
    server.run(port=int(sys.argv[2]), generate_client_file=False, log_level="warning")
"""
BATCH = "8"
IMAGE = [[[0.5] * 8] * 8]
PORT = 8391
HEADERS = {"content-type": "application/json"}


class Measured(NamedTuple):
    """One round of one server."""

    rate: float
    """Requests a second."""
    cpu: float
    """Seconds of CPU time for a request."""
    p50: float
    p99: float
    ping: float
    """The slowest /ping during a large request."""


def main() -> None:
    """Measure all in turns, and print a line for each round, then the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--litserve", metavar="PYTHON", help="of an environment with LitServe")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds: dict[str, list[Measured]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(options.rounds):
            for name, argv in servers(options, Path(scratch)).items():
                with running(argv, PORT) as pid:
                    one = measured(pid, options.clients, options.seconds)
                rounds.setdefault(name, []).append(one)
                print(f"{name}: {one}", flush=True)
    print_table({name: median(each) for name, each in rounds.items()})


def servers(options: argparse.Namespace, scratch: Path) -> dict[str, list[str]]:
    """The command of each server."""
    bare, lit = scratch / "bare.py", scratch / "lit.py"
    bare.write_text(BARE)
    lit.write_text(LITSERVE)
    model, port = str(options.model), str(PORT)
    own = [sys.executable, str(SERVE), model, "--port", port]
    named = {
        "bare starlette": [sys.executable, str(bare), model, port],
        "deploykit": own,
        "deploykit, 2 replicas": [*own, "--replicas", "2"],
        f"deploykit, batches of {BATCH}": [*own, "--max-batch-size", BATCH],
    }
    if options.litserve:
        named["LitServe"] = [options.litserve, str(lit), model, port, "1"]
        named[f"LitServe, batches of {BATCH}"] = [options.litserve, str(lit), model, port, BATCH]
    return named


def measured(pid: int, clients: int, seconds: float) -> Measured:
    """One round of the server that runs."""
    before, began = cpu_seconds(pid), time.monotonic()
    times = load(PORT, clients, seconds)
    took = time.monotonic() - began
    cpu = (cpu_seconds(pid) - before) / len(times)
    slowest = statistics.quantiles(times, n=100)[98]
    ping = max(pings_during_large_request(PORT), default=0.0)
    return Measured(len(times) / took, cpu, statistics.median(times), slowest, ping)


def median(rounds: list[Measured]) -> Measured:
    """The median of each number."""
    return Measured(*map(statistics.median, zip(*rounds, strict=True)))


def print_table(results: dict[str, Measured]) -> None:
    """Print all as Markdown."""
    bare = results["bare starlette"]
    print("| server | requests/s | p50 ms | p99 ms | CPU ms | cpu | slowest /ping ms |")
    print("|---|---|---|---|---|---|---|")
    for name, one in results.items():
        milliseconds = [f"{1000 * each:.1f}" for each in (one.p50, one.p99)]
        cells = [name, f"{one.rate:.0f}", *milliseconds, f"{1000 * one.cpu:.2f}"]
        print("|", " | ".join([*cells, f"{one.cpu / bare.cpu:.2f}", f"{1000 * one.ping:.0f}"]), "|")


@contextlib.contextmanager
def running(argv: list[str], port: int) -> Iterator[int]:
    """Start a server with one thread for each model, wait until it answers, and give its id."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        argv, env=env, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            while not is_up(port):
                if process.poll() is not None:
                    sys.exit(f"{argv[1]} ended with {process.returncode}")
                time.sleep(0.2)
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def is_up(port: int) -> bool:
    """Return whether the server responds."""
    try:
        return request(port, "GET", "/ping") == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False


def cpu_seconds(pid: int) -> float:
    """The CPU time so far of all processes of a session (proc(5), stat: fields 6, 14 and 15)."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == pid:
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
