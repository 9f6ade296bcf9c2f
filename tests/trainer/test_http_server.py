"""The server under hostile clients: others are still served, and memory and CPU stay bounded."""

import contextlib
import resource
import socket
import threading
import time
from http import HTTPStatus

import pytest

from tests.trainer.served import IMAGE, Served, post_request, read_response
from trainer.http_messages import HTTPError, Limits, Request
from trainer.http_server import Server, _call

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("serve")]


def test_idle_connections_block_nobody_and_use_no_cpu(digits_server):
    """Connections that send nothing, never finish the headers, or never send the body."""
    starts = [b"", b"GET /ping HTTP/1.1\r\nA: ", post_request(b"", Content_Length=1000)]
    with contextlib.ExitStack() as stack:
        for number in range(200):
            client = stack.enter_context(digits_server.connect())
            client.sendall(starts[number % 3])
        assert digits_server.is_alive()
        before = digits_server.cpu_seconds()
        time.sleep(3)
        used = digits_server.cpu_seconds() - before
        assert digits_server.is_alive()
        assert digits_server.post({"instances": [IMAGE]})[0] == 200
    assert used < 1, f"{used} s of CPU in 3 s without requests"


def test_more_connections_than_file_descriptors_block_nobody(model_folders, tmp_path):
    """The connections that have waited longest are closed to make room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        served = Served(model_folders["digits"], tmp_path / "log")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            client = stack.enter_context(served.connect())
            client.sendall(b"G")
        for _ in range(5):
            assert served.is_alive()
        before = served.cpu_seconds()
        time.sleep(2)
        assert served.cpu_seconds() - before < 1
    served.close()


def test_bodies_that_never_end_take_little_memory(digits_server):
    before = digits_server.peak_bytes()
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            client = stack.enter_context(digits_server.connect(timeout=1))
            with contextlib.suppress(OSError):
                client.sendall(post_request(b"", Content_Length=6 * 2**20) + bytes(5 * 2**20))
        assert digits_server.is_alive()
    assert digits_server.peak_bytes() - before < 250 * 2**20
    assert digits_server.post({"instances": [IMAGE]})[0] == 200


@pytest.fixture
def serve_with():
    """Start a server with given limits in a thread; connects to it."""
    with contextlib.ExitStack() as stack:

        def start(limits):
            server = Server("127.0.0.1", 0, {"/x": ("POST", lambda _request: {})}, limits)
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            address = ("127.0.0.1", server.server_port)
            return stack.enter_context(socket.create_connection(address))

        yield start


@pytest.mark.parametrize(
    "data", [b"", b"POST /x HT", b"POST /x HTTP/1.1\r\nContent-Length: 5\r\n\r\n{}"]
)
def test_an_incomplete_request_times_out(serve_with, data):
    client = serve_with(Limits(head_seconds=0.5, body_seconds=0.5))
    client.sendall(data)
    assert read_response(client.makefile("rb"))[0] == 408


def test_an_idle_connection_is_closed_without_a_response(serve_with):
    client = serve_with(Limits(idle_seconds=0.5))
    client.sendall(b"POST /x HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
    stream = client.makefile("rb")
    assert read_response(stream) == (200, {})
    assert stream.read() == b""


def test_an_error_in_a_handler_is_a_response_without_details(capsys):
    def broken(_request):
        raise ZeroDivisionError("secret\x1b[2J")

    with pytest.raises(HTTPError, match="internal error") as raised:
        _call(broken, Request("POST", "/", {}, last=False))
    assert raised.value.status == HTTPStatus.INTERNAL_SERVER_ERROR
    assert capsys.readouterr().err == "error: ZeroDivisionError: 'secret\\x1b[2J'\n"
