"""A server among strangers: every request gets an answer in JSON, and nobody stops the others."""

import contextlib
import io
import json
import os
import pickle
import resource
import socket
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import hostile
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import ENTRYPOINTS, PATIENCE, free_port, train_alone

import serve
from trainer import models, weights
from trainer.plain_pickle import Refused

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("hostile")]

SIZES = {"layers": 1, "width": 16, "heads": 2, "sequence": 8}
IMAGE = [[0] * 8] * 8


def model_folder(folder, task):
    """As export.py writes it, of a model that has learned nothing."""
    folder.mkdir()
    model = models.cnn() if task == "digits" else models.gpt(*SIZES.values())
    weights.write(model.state_dict(), folder / "model.safetensors")
    (folder / "model.json").write_text(json.dumps({"task": task, "step": 1, "model": SIZES}))
    return folder


class Served:
    """serve.py in a process of its own."""

    def __init__(self, folder, log, *options):
        self.port = free_port()
        self.log = log
        command = [sys.executable, ENTRYPOINTS / "serve.py", folder, "--port", str(self.port)]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.said = self.process.stdout.readline()
        assert self.said.startswith("serving "), log.read_text()

    def connect(self, timeout=PATIENCE):
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def ask(self, data, *, end=False):
        """Status and content of the first answer to these bytes."""
        with self.connect() as client:
            with contextlib.suppress(ConnectionError):  # it need not read all of it
                client.sendall(data)
            if end:
                client.shutdown(socket.SHUT_WR)
            return answer(client.makefile("rb"))

    def post(self, content, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.ask(request(body, **headers))

    def alive(self):
        return self.ask(b"GET /ping HTTP/1.1\r\n\r\n") == (200, {})

    def cpu_seconds(self):
        """That the process has computed."""
        fields = self.read("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self):
        return int(self.read("status").split("VmHWM:")[1].split()[0]) * 1024

    def read(self, name):
        return Path(f"/proc/{self.process.pid}/{name}").read_text()

    def close(self):
        self.process.terminate()
        code = self.process.wait(PATIENCE)
        self.process.stdout.close()
        assert code == 0
        assert "Traceback" not in self.log.read_text()


def request(body, path="/invocations", **headers):
    words = {"Content-Type": "application/json", "Content-Length": len(body)}
    words |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in words.items() if value is not None)
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def answer(stream):
    """One answer of the server, which must be whole, and JSON, with an error unless it is a 200."""
    line = stream.readline().decode()
    status = int(line.split()[1])
    if status == 100:
        stream.readline()
        return answer(stream)
    headers = {}
    while (header := stream.readline().decode()) != "\r\n":
        name, _, value = header.partition(": ")
        headers[name.lower()] = value.strip()
    assert headers["content-type"] == "application/json"
    content = json.loads(stream.read(int(headers["content-length"])))
    assert status == 200 or list(content) == ["error"]
    return status, content


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {task: model_folder(root / task, task) for task in ("digits", "text")}


@pytest.fixture(scope="module")
def digits(folders, tmp_path_factory):
    served = Served(folders["digits"], tmp_path_factory.mktemp("log") / "digits.log")
    yield served
    served.close()


@pytest.fixture(scope="module")
def text(folders, tmp_path_factory):
    served = Served(folders["text"], tmp_path_factory.mktemp("log") / "text.log")
    yield served
    served.close()


def test_it_listens_on_this_machine_alone_unless_told(digits, folders, tmp_path):
    def listening(served):
        """Its address, as the kernel lists it."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        port = f":{served.port:04X}"
        return [row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"]

    assert listening(digits)[0].startswith("0100007F:")
    everywhere = Served(folders["digits"], tmp_path / "log", "--host", "0.0.0.0")
    assert listening(everywhere)[0].startswith("00000000:")
    everywhere.close()


def test_sagemaker_starts_a_container_with_a_word_of_its_own():
    options = serve.parse(["--host", "0.0.0.0", "serve"])
    assert (options.host, str(options.model)) == ("0.0.0.0", "/opt/ml/model")


LENGTHS = {
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


@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_a_length_that_is_none_or_too_large_is_refused_unread(digits, length):
    before = digits.peak_bytes()
    with digits.connect() as client:
        client.sendall(request(b"", Content_Length=length))
        with contextlib.suppress(OSError):  # the server may have left
            for _ in range(200):
                client.sendall(bytes(2**20))
        assert answer(client.makefile("rb"))[0] == LENGTHS[length]
    assert digits.peak_bytes() - before < 50 * 2**20
    assert digits.alive()


def test_two_lengths_and_chunks_are_refused(digits):
    two = b"POST /invocations HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 5\r\n\r\n{}"
    assert digits.ask(two)[0] == 400
    assert digits.post(b"2\r\n{}\r\n0\r\n\r\n", Transfer_Encoding="chunked")[0] == 411


def test_a_client_that_waits_for_leave_gets_it(digits):
    assert digits.post({"instances": [IMAGE]}, Expect="100-continue")[0] == 200


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
def test_what_is_not_http_is_told_so(digits, data):
    assert digits.ask(data)[0] == 400


def test_versions(digits):
    assert digits.ask(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")[0] in (400, 505)
    assert digits.ask(b"GET /ping HTTP/2.0\r\n\r\n")[0] == 505
    with digits.connect() as client:
        client.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
        stream = client.makefile("rb")
        assert answer(stream) == (200, {})
        assert stream.read() == b"", "the connection ends with an answer to HTTP/1.0"
    assert digits.ask(b"GET /ping HTTP/1.1\n\n") == (200, {})


def test_long_heads_are_refused(digits):
    assert digits.ask(b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\n\r\n")[0] == 431
    assert digits.ask(b"GET /ping HTTP/1.1\r\n" + b"A: b\r\n" * 10**5 + b"\r\n")[0] == 431


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
def test_methods_and_paths(digits, line, status):
    data = f"{line} HTTP/1.1\r\nContent-Length: 0\r\n\r\n".encode()
    assert digits.ask(data)[0] == status


def test_requests_sent_at_once_are_answered_in_their_order(digits):
    image = request(json.dumps({"instances": [IMAGE]}).encode())
    wrong = request(b"{")
    with digits.connect() as client:
        client.sendall(image + b"GET /ping HTTP/1.1\r\n\r\n" + wrong + image)
        stream = client.makefile("rb")
        assert [answer(stream)[0] for _ in range(4)] == [200, 200, 400, 200]


BODIES = {
    "deep lists": b"[" * 3_000_000,
    "deep objects": b'{"a":' * 1_000_000,
    "deep and whole": b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}",
    "not a number": b'{"instances": [[NaN]]}',
    "infinite": b'{"instances": [[Infinity]]}',
    "4000 digits": b'{"instances": [[' + b"9" * 4000 + b"]]}",
    "a million digits": b'{"instances": [[' + b"9" * 1_000_000 + b"]]}",
    "too large for a float": b'{"instances": [' + json.dumps([[1e308] * 8] * 8).encode() + b"]}",
    "infinite by its size": b'{"instances": [[1e999]]}',
    "negative": b'{"instances": [' + json.dumps([[-1] * 8] * 8).encode() + b"]}",
    "none": b'{"instances": []}',
    "empty": b"",
    "a text": b'{"instances": "abc"}',
    "mixed": b'{"instances": [[1, [2]], null, {"a": 1}]}',
    "an object": b'{"instances": {"a": 1}}',
    "of two lengths": b'{"instances": [[1, 2], [3]]}',
    "a list": b"[1, 2]",
    "null": b"null",
    "not UTF-8": b"\xff\xfe\xfa",
    "binary": bytes(range(256)) * 1000,
    "too many": b'{"instances": [' + b",".join([b"[" + b"0," * 63 + b"0]"] * 5000) + b"]}",
}


@pytest.mark.parametrize("name", BODIES)
def test_every_odd_body_gets_an_answer(digits, name):
    status, content = digits.post(BODIES[name])
    assert status == 400
    assert len(content["error"]) < 300
    assert digits.alive()


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "x", "length": 1.5},
        {"prompt": "x", "length": True},
        {"prompt": "x", "length": "9"},
        {"prompt": "\ud800"},
        {"prompt": "x" * 100_000},
        {"prompt": ["x"]},
        {},
    ],
    ids=str,
)
def test_odd_prompts_get_an_answer(text, asked):
    assert text.post(asked)[0] == 400


def test_huge_and_negative_lengths_of_text_are_bounded(text):
    assert text.post({"prompt": "x", "length": -(10**30)}) == (200, {"text": "x"})
    status, content = text.post({"prompt": "x", "length": 10**30})
    assert status == 200
    assert 1 < len(content["text"]) <= 1001


def test_every_answer_is_json_however_odd_the_numbers(digits):
    status, content = digits.post({"instances": [[[16] * 8] * 8] * 3})
    assert status == 200
    assert len(content["predictions"]) == 3


@given(data=st.binary(max_size=400))
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_bytes_as_a_body_get_an_answer(digits, data):
    assert digits.post(data)[0] == 400


@given(data=st.binary(min_size=1, max_size=400))
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_bytes_as_a_request_get_an_answer(digits, data):
    assert digits.ask(data, end=True)[0] in (400, 404, 405, 411, 505)


def test_idle_connections_stop_nobody_and_cost_nothing(digits):
    """Nothing sent, or a head that never ends, or a body that never comes."""
    begun = [b"", b"GET /ping HTTP/1.1\r\nA: ", request(b"", Content_Length=1000)]
    with contextlib.ExitStack() as stack:
        for number in range(200):
            client = stack.enter_context(digits.connect())
            client.sendall(begun[number % 3])
        assert digits.alive()
        before = digits.cpu_seconds()
        time.sleep(3)
        used = digits.cpu_seconds() - before
        assert digits.alive()
        assert digits.post({"instances": [IMAGE]})[0] == 200
    assert used < 1, f"{used} s of computing in 3 s of idleness"


def test_more_connections_than_there_are_files_stop_nobody(folders, tmp_path):
    """The kernel gives no more than so many; those that have waited longest make room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        served = Served(folders["digits"], tmp_path / "log")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            client = stack.enter_context(served.connect())
            client.sendall(b"G")
        for _ in range(5):
            assert served.alive()
        before = served.cpu_seconds()
        time.sleep(2)
        assert served.cpu_seconds() - before < 1
    served.close()


def test_bodies_that_never_end_take_little_memory(digits):
    before = digits.peak_bytes()
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            client = stack.enter_context(digits.connect(timeout=1))
            with contextlib.suppress(OSError):
                client.sendall(request(b"", Content_Length=6 * 2**20) + bytes(5 * 2**20))
        assert digits.alive()
    assert digits.peak_bytes() - before < 250 * 2**20
    assert digits.post({"instances": [IMAGE]})[0] == 200


def test_slow_clients_are_told_and_left():
    """With limits of a second, so that nobody waits for ten."""
    import threading

    from trainer.http_messages import Limits
    from trainer.http_server import Server

    limits = Limits(head_seconds=0.5, body_seconds=0.5, idle_seconds=0.5)
    server = Server("127.0.0.1", 0, {"/x": ("POST", lambda _request: {})}, limits)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        for data in (b"", b"POST /x HT", b"POST /x HTTP/1.1\r\nContent-Length: 5\r\n\r\n{}"):
            with socket.create_connection(("127.0.0.1", server.server_port)) as client:
                client.sendall(data)
                assert answer(client.makefile("rb"))[0] == 408
        with socket.create_connection(("127.0.0.1", server.server_port)) as client:
            client.sendall(b"POST /x HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
            stream = client.makefile("rb")
            assert answer(stream) == (200, {})
            assert stream.read() == b"", "an idle connection ends without an answer"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_error_of_ours_is_an_answer_and_not_a_traceback(digits, capsys):
    from http import HTTPStatus

    from trainer.http_messages import HTTPError, Request
    from trainer.http_server import _made

    def broken(_request):
        raise ZeroDivisionError("secret\x1b[2J")

    with pytest.raises(HTTPError, match="internal error") as raised:
        _made(broken, Request("POST", "/", {}, last=False))
    assert raised.value.status == HTTPStatus.INTERNAL_SERVER_ERROR
    assert capsys.readouterr().err == "error: ZeroDivisionError: 'secret\\x1b[2J'\n"


def dotted(canary):
    return b"\x80\x04" + hostile.call("torch", hostile.DOTTED, "touch", str(canary)) + b"."


def reduced(canary):
    return pickle.dumps(hostile.Touch(canary))


@pytest.mark.parametrize("payload", [dotted, reduced])
def test_serving_a_hostile_model_runs_no_code(payload, tmp_path):
    """A weight in the program that export.py writes, replaced by a pickle that starts another."""
    import export

    train_alone(tmp_path, "--epochs", "1", "--no-tensorboard")
    with pytest.MonkeyPatch.context() as patch:
        words = ["export", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "model")]
        patch.setattr(sys, "argv", words)
        export.main()
    program, canary = tmp_path / "model" / "model.pt2", tmp_path / "canary"
    program.write_bytes(with_pickled_weights(program.read_bytes(), payload(canary)))
    with contextlib.suppress(Exception):  # as soon as it is loaded, it has run
        server = serve.start(tmp_path / "model", "127.0.0.1", 0)
        server.server_close()
    time.sleep(0.2)

    assert not canary.exists()
    assert serve.load(tmp_path / "model")({"instances": [IMAGE]})["predictions"]
    load = [sys.executable, "-c", f"import torch; torch.export.load({str(program)!r})"]
    subprocess.run(load, capture_output=True, check=False)
    time.sleep(0.2)
    assert canary.exists(), "torch's own loading runs it, or this test would show nothing"


def with_pickled_weights(data, payload):
    """A torch.export program whose weights say that they are pickles, which one of them is."""

    def change(name, content):
        if name.endswith("weights_config.json"):
            return content.replace(b'"use_pickle": false', b'"use_pickle": true')
        return payload if name.endswith("weight_0") else content

    out = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(out)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            inner = name.partition("/")[2]
            if inner not in ("version", "byteorder") and not inner.startswith(".data/"):
                content = change(name, archive.read(name))
                writer.write_record(inner, content, len(content))
    writer.write_end_of_file()
    return out.getvalue()


HEADERS = [
    b"",
    b"[]",
    b"[" * 100_000,
    b'{"a": 1}',
    b'{"a": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4398046511104]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
    b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
    b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": "11", "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "object", "shape": [1], "data_offsets": [0, 4]}}',
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_odd_weights_are_refused(header, folders, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.json").write_bytes((folders["digits"] / "model.json").read_bytes())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(Refused):
        serve.load(folder)


def test_two_weights_that_share_bytes_are_refused(tmp_path):
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": one, "b": one}).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(Refused, match="does not lie behind"):
        weights.read(tmp_path / "x")


@pytest.mark.parametrize(
    "about",
    [
        "",
        "[]",
        "[" * 60_000,
        '{"task": "digits"}',
        '{"task": ["digits"], "model": {}}',
        '{"task": "os", "model": {"layers": 1, "width": 16, "heads": 2, "sequence": 8}}',
        '{"task": "text", "model": {"layers": 1e9, "width": 16, "heads": 2, "sequence": 8}}',
        '{"task": "text", "model": {"layers": 9999, "width": 16, "heads": 2, "sequence": 8}}',
        '{"task": "text", "model": {"layers": 1, "width": 999424, "heads": 2, "sequence": 8}}',
        '{"task": "text", "model": {"layers": 1, "width": 16, "heads": 0, "sequence": 8}}',
    ],
    ids=range(10),
)
def test_an_odd_description_of_a_model_is_refused(about, folders, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.json").write_text(about)
    data = (folders["text"] / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(Refused):
        serve.load(folder)


def test_a_folder_without_a_model_ends_with_a_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, ENTRYPOINTS / "serve.py", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("serve.py: error: ")
    assert "Traceback" not in done.stderr
