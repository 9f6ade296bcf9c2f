"""The 55 hostile requests that the first server survived, against the one of `deploykit deploy`.

The package has the reference trainer's `inference.py`, and a model of the digits without training.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file

import inference
from tests.test_serve import Server
from tests.trainer.ranks import ENTRYPOINTS
from trainer import models
from trainer.train_options import ModelOptions

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("serve")]

IMAGE = [[[0.5] * 8] * 8]
BODIES = {
    "deep lists": b"[" * 3_000_000,
    "deep objects": b'{"a":' * 1_000_000,
    "deep but complete": b'{"inputs": ' + b"[" * 900 + b"]" * 900 + b"}",
    "not a number": b'{"inputs": [[NaN]]}',
    "infinite": b'{"inputs": [[Infinity]]}',
    "4000 digits": b'{"inputs": [[' + b"9" * 4000 + b"]]}",
    "a million digits": b'{"inputs": [[' + b"9" * 1_000_000 + b"]]}",
    "too large for a float": b'{"inputs": [' + json.dumps([[1e308] * 8] * 8).encode() + b"]}",
    "overflows to infinity": b'{"inputs": [[1e999]]}',
    "negative": b'{"inputs": [' + json.dumps([[-1] * 8] * 8).encode() + b"]}",
    "no images": b'{"inputs": []}',
    "empty": b"",
    "a string": b'{"inputs": "abc"}',
    "mixed types": b'{"inputs": [[1, [2]], null, {"a": 1}]}',
    "an object": b'{"inputs": {"a": 1}}',
    "ragged": b'{"inputs": [[1, 2], [3]]}',
    "a list": b"[1, 2]",
    "null": b"null",
    "not UTF-8": b"\xff\xfe\xfa",
    "binary": bytes(range(256)) * 1000,
    "too many": b'{"inputs": [' + b",".join([b"[" + b"0," * 63 + b"0]"] * 5000) + b"]}",
}
SHAPED = {
    "no number": b'{"inputs": ' + json.dumps([[[[0.5] * 7 + ["?"]] * 8]]).encode() + b"}",
    "NaN": b'{"inputs": ' + json.dumps([[[[float("nan")] * 8] * 8]]).encode() + b"}",
    "infinity": b'{"inputs": ' + json.dumps([[[[float("inf")] * 8] * 8]]).encode() + b"}",
    "1e999": b'{"inputs": [[[' + b",".join([b"[" + b",".join([b"1e999"] * 8) + b"]"] * 8) + b"]]]}",
    "above single precision": b'{"inputs": ' + json.dumps([[[[1e300] * 8] * 8]]).encode() + b"}",
}
"""Of the shape of an image, with values that are not finite."""
LENGTHS = ["-1", "-600000000", "600000000", "9" * 30, "67108865", "twelve", "1e3", "0x10", "+5"]
LENGTHS += ["1_0", "5, 5", "", None]
INVALID = [
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
]
PATHS = {
    "GET /elsewhere": 404,
    "GET /invocations": 405,
    "GET /../../etc/passwd": 404,
    "DELETE /ping": 405,
    "BREW /ping": 405,
    "GET /ping?x=1": 200,
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A server of an untrained model of the digits."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    code = folder / "code"
    shutil.copytree(ENTRYPOINTS / "trainer", code / "trainer")
    shutil.copy(ENTRYPOINTS / "inference.py", code)
    save_file(models.cnn().state_dict(), folder / "model.safetensors")
    settings = ModelOptions(task="digits", sequence=8, layers=1, width=16, heads=2)
    inputs = {"": {"dtype": "float32", "shape": [1, 8, 8]}}
    description = {"settings": asdict(settings), "path": ".", "inputs": inputs}
    (folder / "model.json").write_text(json.dumps(description))
    server = Server(folder)
    yield server
    assert server.stop()[0] == 0


def test_the_55_of_the_first_server(digits):
    assert len(BODIES) + len(LENGTHS) + len(INVALID) + len(PATHS) == 55
    for name, body in {**BODIES, **SHAPED}.items():
        status, content = digits.post(body)
        assert status == 400, (name, status, content)
        assert len(content["error"]) < 1100, name
        assert digits.ping() == 200, name
    head = b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for length in LENGTHS:
        line = b"" if length is None else b"Content-Length: %s\r\n" % length.encode()
        status = digits.send(head + line + b"\r\n", end=True)
        assert status is None or 400 <= status < 500, (length, status)
        assert digits.ping() == 200, length
    for data in INVALID:
        status = digits.send(data, end=True)
        assert status is None or 400 <= status < 500, (data[:60], status)
        assert digits.ping() == 200, data[:60]
    for line, expected in PATHS.items():
        data = f"{line} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
        assert digits.send(data) == expected, line


def test_others_are_answered_in_valid_json_meanwhile(digits):
    status, content = digits.post({"inputs": [IMAGE] * 3})
    assert status == 200
    assert torch.tensor(content["outputs"]).shape == (3, 10)


def test_outputs_that_json_cannot_express_are_an_error():
    outputs = torch.tensor([float("nan")])
    with pytest.raises(ValueError, match="JSON cannot represent outputs that are not finite"):
        inference.output_fn(outputs, "application/json")
    assert inference.output_fn(outputs, "application/x-npy")[1] == "application/x-npy"
