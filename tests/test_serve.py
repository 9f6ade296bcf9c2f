"""`entrypoints/serve.py` with a package that needs no torch: its limits, and what goes wrong."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import boto3
import pytest
from botocore.config import Config

SERVE = Path(__file__).parents[1] / "entrypoints/serve.py"
PATIENCE = 120
"""Seconds, on a slow machine."""
JSON = "application/json"
INFERENCE = """\
import json, os, sys, time
from pathlib import Path

def model_fn(model_dir):
    if Path(model_dir, "broken").exists():
        raise OSError("no weights")
    return Path(model_dir)

def input_fn(body, content_type):
    if content_type != "application/json":
        raise ValueError(f"not {content_type}")
    return json.loads(body)

def predict_fn(data, folder, context):
    if data == "die":
        os._exit(3)
    if data == "wait":
        (folder / f"waiting-{os.getpid()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    if data == "slow":
        time.sleep(0.8)
    if data == "raise":
        raise RuntimeError("of the model")
    if data == [[1, 2, 3]]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x3 and 4x2)")
    if isinstance(data, list):
        return len(data)
    return [os.getpid(), os.environ.get("DEPLOYKIT_DEVICE", ""), data]

def output_fn(prediction, accept):
    return json.dumps(prediction), accept
"""


class Server:
    """A server as a child, with functions of a client."""

    def __init__(self, package, *options):
        self.package = package
        self.process = subprocess.Popen(
            [sys.executable, str(SERVE), str(package), "--port", "0", "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = json.loads(self.process.stdout.readline())["url"]
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        self.address = host, int(port)

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def post(self, data, content_type=JSON):
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        status, answer = self.request("POST", "/invocations", body, {"content-type": content_type})
        return status, json.loads(answer)

    def ping(self):
        return self.request("GET", "/ping")[0]

    def send(self, data, *, end=False):
        """The status of the answer to any bytes; None if the connection is closed without one.

        With `end` the client sends nothing more, and says so.
        """
        with socket.create_connection(self.address, PATIENCE) as client:
            with contextlib.suppress(OSError):  # the server may have answered and closed it
                client.sendall(data)
                if end:
                    client.shutdown(socket.SHUT_WR)
            try:
                line = client.makefile("rb").readline()
            except ConnectionError:
                return None
        return int(line.split()[1]) if line else None

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "a model"
    (folder / "code").mkdir(parents=True)
    (folder / "code/inference.py").write_text(INFERENCE)
    return folder


@pytest.fixture
def serve(package):
    servers = []

    def start(*options):
        servers.append(Server(package, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.communicate()


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_requests_answers_and_a_clean_end(serve):
    server = serve("--device", "cuda:7")
    assert server.ping() == 200
    status, (pid, device, data) = server.post({"a": 1})
    assert (status, device, data) == (200, "cuda:7", {"a": 1})
    assert server.post(b"{")[0] == 400
    assert server.post({}, "text/csv") == (400, {"error": "ValueError: not text/csv"})
    assert server.post("raise") == (500, {"error": "RuntimeError: of the model"})
    status, answer = server.post([[1, 2, 3]])  # the shape of the client's input
    assert (status, "mat1 and mat2 shapes cannot be multiplied" in answer["error"]) == (400, True)
    assert server.request("GET", "/invocations")[0] == 405
    assert server.request("GET", "/nothing")[0] == 404
    code, errors = server.stop()
    assert code == 0
    assert "RuntimeError: of the model" in errors  # the log has the traceback
    until(lambda: not alive(pid))


def test_a_client_of_sagemaker(serve):
    server = serve()
    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=Config(retries={"max_attempts": 0}),
    )
    answer = client.invoke_endpoint(EndpointName="any", Body=b'"x"', ContentType=JSON)
    assert (answer["ContentType"], json.load(answer["Body"])[2]) == (JSON, "x")


@pytest.mark.slow
def test_health_is_known_while_a_large_request_is_parsed(serve):
    server = serve()
    body = b"[" + b"0.5," * 12_500_000 + b"1]"
    assert len(body) > 50_000_000
    pings = 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(server.post, body)
        while not answer.done():
            pings += server.ping() == 200
        assert answer.result() == (200, 12_500_001)
    assert pings > 1


def test_too_large_bodies_are_refused_unread(serve):
    server = serve("--max-body", "1000")
    assert server.post(b" " * 998 + b"[]") == (200, 0)
    assert server.post(b" " * 999 + b"[]")[0] == 413
    head = b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    for length in (1001, 10**17):
        assert server.send(head % length) == 413
    chunked = b"POST /invocations HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert server.send(chunked + b"3e8\r\n" + b" " * 1000 + b"\r\n2\r\n[]\r\n0\r\n\r\n") == 413
    assert server.send(chunked + b"2\r\n[]\r\n0\r\n\r\n") == 200


def test_one_request_too_many_is_refused_and_replicas_work_side_by_side(serve, package):
    server = serve("--replicas", "2", "--concurrency", "2")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.post, "wait")
        until(lambda: list(package.glob("waiting-*")))
        assert server.post("other")[0] == 200
        second = pool.submit(server.post, "wait")
        until(lambda: len(list(package.glob("waiting-*"))) == 2)
        assert server.post("third")[0] == 503
        assert server.ping() == 200
        (package / "go").touch()
        pids = {each.result()[1][0] for each in (waiting, second)}
    assert len(pids) == 2


BATCHED = """
def predict_batch_fn(inputs, folder):
    with Path(folder, "sizes").open("a") as file:
        print(len(inputs), file=file)
    if "raise" in inputs:
        raise RuntimeError("of the batch")
    if "lose" in inputs:
        return []
    return [[os.getpid(), "together", data] for data in inputs]
"""


@pytest.fixture
def batched(package):
    """A package that answers requests together; `sizes` has the number of each batch."""
    with (package / "code/inference.py").open("a") as file:
        file.write(BATCHED)
    return package


def post_all(server, data):
    with concurrent.futures.ThreadPoolExecutor(len(data)) as pool:
        return list(pool.map(server.post, data))


def test_requests_within_the_window_are_answered_together(serve, batched):
    """The window is longer than the test: a batch is sent because it is full."""
    server = serve("--max-batch-size", "4", "--batch-timeout", "900", "--replicas", "2")
    answers = post_all(server, list(range(12)))
    assert [(status, answer[1:]) for status, answer in answers] == [
        (200, ["together", number]) for number in range(12)
    ]
    assert (batched / "sizes").read_text().split() == ["4", "4", "4"]


def test_requests_that_come_while_all_replicas_are_busy_are_answered_together(serve, batched):
    server = serve("--max-batch-size", "64", "--batch-timeout", "0", "--concurrency", "7")
    with concurrent.futures.ThreadPoolExecutor(11) as pool:
        busy = pool.submit(server.post, "wait")
        until(lambda: list(batched.glob("waiting-*")))
        others = [pool.submit(server.post, number) for number in range(10)]
        until(lambda: sum(each.done() for each in others) == 4)  # refused: six are waiting
        assert [server.ping() for _ in range(5)] == [200] * 5
        (batched / "go").touch()
        statuses = sorted(each.result()[0] for each in (busy, *others))
    assert statuses == [200] * 7 + [503] * 4
    assert (batched / "sizes").read_text().split() == ["6"]


@pytest.mark.parametrize("data", ["raise", "lose"])
def test_a_batch_that_fails_is_answered_request_by_request(serve, batched, data):
    server = serve("--max-batch-size", "3", "--batch-timeout", "900")
    answers = post_all(server, [data, 1, 2])
    assert (batched / "sizes").read_text().split() == ["3"]
    assert [status for status, _ in answers] == [500 if data == "raise" else 200, 200, 200]
    assert [answer[2] for _, answer in answers[1:]] == [1, 2]
    _, errors = server.stop()
    assert ("RuntimeError: of the batch" in errors) == (data == "raise")
    assert ("returned 0 predictions for 3" in errors) == (data == "lose")


@pytest.mark.slow
def test_after_a_batch_that_fails_each_request_has_the_whole_time(serve, batched):
    server = serve("--max-batch-size", "4", "--batch-timeout", "900", "--timeout", "2")
    answers = post_all(server, ["raise", *(["slow"] * 3)])  # slow ones alone: 2.4 s
    assert [status for status, _ in answers] == [500, 200, 200, 200]


def test_without_a_function_for_batches_they_are_refused(package):
    argv = [sys.executable, str(SERVE), str(package), "--port", "0", "--max-batch-size", "2"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert "code/inference.py has no function predict_batch_fn" in done.stderr


@pytest.mark.slow
def test_a_replica_that_exceeds_the_time_limit_is_replaced(serve, package):
    server = serve("--timeout", "2")
    status, answer = server.post("wait")
    assert (status, answer) == (504, {"error": "no response within 2 s"})
    until(lambda: server.ping() == 200 and server.post("again")[0] == 200)


def test_a_replica_that_ends_is_replaced_and_a_broken_model_stops_the_server(serve, package):
    server = serve()
    assert server.post("die")[0] == 500
    until(lambda: server.ping() == 200)
    assert server.post("again")[0] == 200
    (package / "broken").touch()
    assert server.post("die")[0] == 500
    _, errors = server.process.communicate(timeout=PATIENCE)
    assert server.process.returncode == 1
    assert f"serve.py: error: cannot load the model of {package}" in errors


def test_replicas_end_with_a_server_that_is_killed(serve):
    server = serve()
    pid = server.post({})[1][0]
    server.process.kill()
    until(lambda: not alive(pid))


def test_requests_underway_are_answered_after_sigterm(serve, package):
    server = serve()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.post, "wait")
        until(lambda: list(package.glob("waiting-*")))
        server.process.terminate()
        (package / "go").touch()
        assert waiting.result()[0] == 200
    assert server.process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda code: (code / "inference.py").unlink(), "No module named 'inference'"),
        (
            lambda code: (code / "inference.py").write_text("def model_fn(folder): pass"),
            "code/inference.py has no function input_fn, predict_fn, output_fn",
        ),
        (lambda code: (code.parent / "broken").touch(), "OSError: no weights"),
    ],
)
def test_a_package_that_cannot_be_loaded(package, change, message):
    change(package / "code")
    argv = [sys.executable, str(SERVE), str(package), "--port", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.endswith(f"serve.py: error: cannot load the model of {package}\n")
    assert done.stdout == ""


def test_a_port_in_use(serve, package):
    port = serve().address[1]
    argv = [sys.executable, str(SERVE), str(package), "--port", str(port)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    message = f"serve.py: error: cannot listen on port {port} of 127.0.0.1: {os.strerror(98)}"
    hint = "; choose another --port, or 0 for any\n"
    assert (done.returncode, done.stderr) == (1, message + hint)


HOSTILE = [
    b"",
    b"\r\n\r\n\r\n\r\n",
    b"\x00" * 1000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    b"\xff\xfe\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /ping\r\n\r\n",
    b"GET ping HTTP/1.1\r\n\r\n",
    b"GET /p\x1b]52;c;aGk=\x07 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /ping HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /ping HTTP/1.1\r\nHost: x\r\n: no name\r\n\r\n",
    b"GET /ping HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
    b"GET /ping HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /ping HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 10**5 + b"\r\n",
]
FRAMES = [
    b"Content-Length: -1\r\n\r\n",
    b"Content-Length: +2\r\n\r\n{}",
    b"Content-Length: 0x2\r\n\r\n{}",
    b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}",
    b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"Content-Length: 99\r\n\r\n{}",
    b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
    b"Transfer-Encoding: gzip\r\n\r\n{}",
    b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 5000 + b"\r\n",
    b"Expect: nonsense\r\nContent-Length: 2\r\n\r\n{}",
]
SURROGATE = b'"\\ud800"'
"""JSON that Python reads, and writes again."""
ODD = (SURROGATE, b"Expect: nonsense")
"""What may be answered: the model accepts anything, and an unknown expectation may be ignored."""
BODIES = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"{",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"1" * 10_000,
    b"1e999999999",
    SURROGATE,
    b'{"inputs": NaN',
    b"\x80\x04\x95" + b"a" * 100,
    b"\x1f\x8b\x08" + b"\x00" * 100,
]


def test_hostile_requests_get_an_error_and_others_are_served(serve):
    """Bytes that are no HTTP, wrong frames, and bodies that no parser takes."""
    server = serve()
    head = b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    framed = [head + frame for frame in FRAMES]
    framed += [head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body) for body in BODIES]
    for data in [*HOSTILE, *framed]:
        status = server.send(data, end=True)
        allowed = status is None or 400 <= status < 500 or any(odd in data for odd in ODD)
        assert allowed, (data[:80], status)
        assert server.ping() == 200
    assert server.post("others")[0] == 200
    assert server.stop()[0] == 0
