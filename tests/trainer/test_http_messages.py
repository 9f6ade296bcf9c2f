"""HTTP requests that are invalid, too large or unusual each get the right response."""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer.served import IMAGE, post_request, read_response

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("serve")]

ANY_BYTES = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

STATUS_BY_LENGTH = {
    "-1": 400,
    "-600000000": 400,
    "600000000": 413,
    "9" * 30: 400,
    "6291457": 413,
    "twelve": 400,
    "1e3": 400,
    "0x10": 400,
    "+5": 400,
    "1_0": 400,
    "5, 5": 400,
    "": 400,
    None: 411,
}


@pytest.mark.parametrize("length", STATUS_BY_LENGTH, ids=str)
def test_an_invalid_or_too_large_length_is_refused_before_the_body_is_read(digits_server, length):
    before = digits_server.peak_bytes()
    with digits_server.connect() as client:
        client.sendall(post_request(b"", Content_Length=length))
        with contextlib.suppress(OSError):  # the server may have closed the connection
            for _ in range(200):
                client.sendall(bytes(2**20))
        assert read_response(client.makefile("rb"))[0] == STATUS_BY_LENGTH[length]
    assert digits_server.peak_bytes() - before < 50 * 2**20
    assert digits_server.is_alive()


def test_two_lengths_and_chunked_bodies_are_refused(digits_server):
    two = b"POST /invocations HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 5\r\n\r\n{}"
    assert digits_server.send(two)[0] == 400
    chunked = digits_server.post(b"2\r\n{}\r\n0\r\n\r\n", Transfer_Encoding="chunked")
    assert chunked[0] == 411


def test_expect_100_continue(digits_server):
    assert digits_server.post({"instances": [IMAGE]}, Expect="100-continue")[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"\x00" * 1000,
        b"\xff\xfe\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /ping\r\n\r\n",
        b"GET  /ping HTTP/1.1\r\n\r\n",
        b"GET /ping HTTP/1.1 \r\n\r\n",
        b"GET ping HTTP/1.1\r\n\r\n",
        b"GET /p\x1b]52;c;aGk=\x07 HTTP/1.1\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /ping HTTP/1.1\r\n: no name\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nA: b\r\n folded\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nA: \x00\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nA : b\r\n\r\n",
        b"\r\n\r\n\r\n\r\n",
    ],
)
def test_invalid_http_is_a_bad_request(digits_server, data):
    assert digits_server.send(data)[0] == 400


def test_http_versions(digits_server):
    assert digits_server.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")[0] in (400, 505)
    assert digits_server.send(b"GET /ping HTTP/2.0\r\n\r\n")[0] == 505
    with digits_server.connect() as client:
        client.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
        stream = client.makefile("rb")
        assert read_response(stream) == (200, {})
        assert stream.read() == b"", "HTTP/1.0: the connection ends with the response"
    assert digits_server.send(b"GET /ping HTTP/1.1\n\n") == (200, {})


def test_too_large_heads_are_refused(digits_server):
    assert digits_server.send(b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\n\r\n")[0] == 431
    headers = b"A: b\r\n" * 10**5
    assert digits_server.send(b"GET /ping HTTP/1.1\r\n" + headers + b"\r\n")[0] == 431


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /elsewhere", 404),
        ("GET /invocations", 405),
        ("GET /../../etc/passwd", 404),
        ("DELETE /ping", 405),
        ("BREW /ping", 405),
        ("GET /ping?x=1", 200),
    ],
)
def test_methods_and_paths(digits_server, line, status):
    data = f"{line} HTTP/1.1\r\nContent-Length: 0\r\n\r\n".encode()
    assert digits_server.send(data)[0] == status


def test_pipelined_requests_are_answered_in_order(digits_server):
    image = post_request(b'{"instances": [' + str(IMAGE).encode() + b"]}")
    invalid = post_request(b"{")
    with digits_server.connect() as client:
        client.sendall(image + b"GET /ping HTTP/1.1\r\n\r\n" + invalid + image)
        stream = client.makefile("rb")
        assert [read_response(stream)[0] for _ in range(4)] == [200, 200, 400, 200]


@given(data=st.binary(max_size=400))
@ANY_BYTES
def test_any_bytes_as_a_body_get_a_response(digits_server, data):
    assert digits_server.post(data)[0] == 400


@given(data=st.binary(min_size=1, max_size=400))
@ANY_BYTES
def test_any_bytes_as_a_request_get_a_response(digits_server, data):
    assert digits_server.send(data, end=True)[0] in (400, 404, 405, 411, 505)
