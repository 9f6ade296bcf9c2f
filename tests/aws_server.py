"""Fixtures: a real moto server behind a proxy that records the requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from tests.ports import free_port

SECTION = """\
sagemaker:
  role: arn:aws:iam::123456789012:role/training
  bucket: my-bucket
  region: us-east-1
  instance_type: ml.g5.xlarge
  framework_version: 2.8.0
  sender: boto3
"""
"""Section of a job file, for a job that the server accepts."""


@pytest.fixture(scope="session")
def moto():
    with moto_server() as port:
        yield port


@contextlib.contextmanager
def moto_server(*words, **environment):
    """Run a moto server; yields its port. Without moto it fails instead of skipping."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), *words],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, server)
        yield port
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def aws(moto, monkeypatch, tmp_path):
    """The moto server without data, as the AWS of this test; `.requests` holds each request.

    `.answers` maps an action that moto lacks to a function from the request's body to the response.
    """
    _ask(moto, "POST", "/moto-api/reset")
    for name in [name for name in os.environ if name.startswith(("AWS_", "SAGEMAKER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    _ask(moto, "PUT", "/my-bucket", {"Host": "s3.amazonaws.com"})
    with recorder(moto) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def enforced(moto):
    """A function that enables IAM for all further requests; disabled again at the end."""
    yield lambda: _ask(moto, "POST", "/moto-api/reset-auth", body=b"0")
    _ask(moto, "POST", "/moto-api/reset-auth", body=b"inf")


@contextlib.contextmanager
def recorder(port, address="127.0.0.1"):
    """A proxy at `endpoint`, at `address`, that records requests and forwards them to a port."""
    proxy = _Recorder(port, address)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()


class BrokenOff(bytes):
    """The first half of a content, after which the connection is closed."""

    def __new__(cls, content):
        made = super().__new__(cls, content[: len(content) // 2])
        made.announced = len(content)
        return made


class _Recorder(ThreadingHTTPServer):
    """Records requests and forwards them to a local port.

    `respond` may answer instead: it takes the request and a function that forwards it, and returns
    status, headers and content; or None, and the connection is closed without an answer.
    """

    daemon_threads = True
    request_queue_size = 128  # many clients at once

    def __init__(self, target, address):
        super().__init__((address, 0), _Forwarding)
        self.target, self.requests, self.answers = target, [], {}
        self.port, self.endpoint = self.server_port, f"http://{address}:{self.server_port}"
        self.respond = lambda _, forward: forward()


class _Forwarding(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body waits for the headers' acknowledgement, 40 ms

    def _handle(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        action = self.headers.get("X-Amz-Target", self.path).rsplit(".", 1)[-1]
        headers = {name.lower(): value for name, value in self.headers.items()}
        one = SimpleNamespace(
            method=self.command, path=self.path, action=action, body=body, headers=headers
        )
        self.server.requests.append(one)
        answer = self.server.respond(one, lambda: self._forward(one))
        if answer is None:
            self.close_connection = True
            return
        status, headers, content = answer
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(name, value)
        length = dict(headers).get("Content-Length") if one.method == "HEAD" else None
        if isinstance(content, BrokenOff):
            length, self.close_connection = content.announced, True
        self.send_header("Content-Length", length or len(content))
        self.end_headers()
        if one.method != "HEAD":
            self.wfile.write(content)

    def _forward(self, one):
        if one.action in self.server.answers:
            return as_json(200, self.server.answers[one.action](json.loads(one.body)))
        with closing(http.client.HTTPConnection("127.0.0.1", self.server.target)) as moto:
            try:
                moto.request(one.method, self.path, one.body, dict(self.headers))
                answer = moto.getresponse()
                return answer.status, answer.getheaders(), answer.read()
            except ConnectionError:  # it has just been stopped
                return None

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815

    def log_message(self, *_):
        pass


def as_json(status, data):
    """A response of a service with a JSON protocol: status, headers and content."""
    return status, [("Content-Type", "application/x-amz-json-1.1")], json.dumps(data).encode()


def sent_requests(aws):
    """The body of every CreateTrainingJob request that arrived."""
    return [json.loads(one.body) for one in aws.requests if one.action == "CreateTrainingJob"]


def _ask(port, method, path, headers=None, body=None):
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        assert answer.status < 300, answer.read()
        answer.read()


def _wait_for(port, server):
    for _ in range(3000):
        assert server.poll() is None, "the moto server exited: is moto[server] installed?"
        with socket.socket() as asking:
            if asking.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail("the moto server did not answer within 300 s")
