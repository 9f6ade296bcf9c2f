"""serve.py: its command line, and its responses to unusual content."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import serve
from tests.trainer.ranks import ENTRYPOINTS
from tests.trainer.served import Served

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("serve")]


def test_it_listens_on_loopback_unless_told_otherwise(digits_server, model_folders, tmp_path):
    def addresses(served):
        """Those on which it listens, as the kernel lists them."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        port = f":{served.port:04X}"
        return [row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"]

    assert addresses(digits_server)[0].startswith("0100007F:")
    everywhere = Served(model_folders["digits"], tmp_path / "log", "--host", "0.0.0.0")
    assert addresses(everywhere)[0].startswith("00000000:")
    everywhere.close()


def test_sagemaker_passes_an_argument_of_its_own():
    options = serve.parse(["--host", "0.0.0.0", "serve"])
    assert (options.host, str(options.model)) == ("0.0.0.0", "/opt/ml/model")


def test_a_folder_without_a_model_is_an_error(tmp_path):
    done = subprocess.run(
        [sys.executable, ENTRYPOINTS / "serve.py", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("serve.py: error: ")
    assert "Traceback" not in done.stderr


BODIES = {
    "deep lists": b"[" * 3_000_000,
    "deep objects": b'{"a":' * 1_000_000,
    "deep but complete": b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}",
    "not a number": b'{"instances": [[NaN]]}',
    "infinite": b'{"instances": [[Infinity]]}',
    "4000 digits": b'{"instances": [[' + b"9" * 4000 + b"]]}",
    "a million digits": b'{"instances": [[' + b"9" * 1_000_000 + b"]]}",
    "too large for a float": b'{"instances": [' + json.dumps([[1e308] * 8] * 8).encode() + b"]}",
    "overflows to infinity": b'{"instances": [[1e999]]}',
    "negative": b'{"instances": [' + json.dumps([[-1] * 8] * 8).encode() + b"]}",
    "no images": b'{"instances": []}',
    "empty": b"",
    "a string": b'{"instances": "abc"}',
    "mixed types": b'{"instances": [[1, [2]], null, {"a": 1}]}',
    "an object": b'{"instances": {"a": 1}}',
    "ragged": b'{"instances": [[1, 2], [3]]}',
    "a list": b"[1, 2]",
    "null": b"null",
    "not UTF-8": b"\xff\xfe\xfa",
    "binary": bytes(range(256)) * 1000,
    "too many": b'{"instances": [' + b",".join([b"[" + b"0," * 63 + b"0]"] * 5000) + b"]}",
}


@pytest.mark.parametrize("name", BODIES)
def test_an_invalid_body_is_a_bad_request(digits_server, name):
    status, content = digits_server.post(BODIES[name])
    assert status == 400
    assert len(content["error"]) < 300
    assert digits_server.is_alive()


@pytest.mark.parametrize(
    "content",
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
def test_an_invalid_prompt_is_a_bad_request(text_server, content):
    assert text_server.post(content)[0] == 400


def test_huge_and_negative_lengths_of_text_are_bounded(text_server):
    negative = text_server.post({"prompt": "x", "length": -(10**30)})
    assert negative == (200, {"text": "x"})
    status, content = text_server.post({"prompt": "x", "length": 10**30})
    assert status == 200
    assert 1 < len(content["text"]) <= 1001


def test_the_largest_pixels_give_valid_json(digits_server):
    status, content = digits_server.post({"instances": [[[16] * 8] * 8] * 3})
    assert status == 200
    assert len(content["predictions"]) == 3
