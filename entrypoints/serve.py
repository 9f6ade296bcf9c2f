"""Answer over HTTP with an exported model; what SageMaker hosting asks of a container.

    python serve.py model --port 8080
    curl localhost:8080/invocations -H 'Content-Type: application/json' -d '{"instances": [...]}'

`GET /ping` says 200 once the model is loaded. `POST /invocations` takes `{"instances": [...]}`, a
list of inputs in the shape of `model.json`, pixels from 0 to 16; it gives the class and the
probabilities of each. For a text model it takes `{"prompt": "...", "length": 100}` and continues
it. The contract: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from trainer.tasks import normal

LARGEST = 6 * 2**20
"""Bytes of a request: what SageMaker lets through to a real-time endpoint is 6 MB."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class BadRequest(Exception):
    """What is wrong with a request, in words for whoever sent it."""


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        server = start(options.model, options.host, options.port)
    except OSError as error:
        sys.exit(f"serve.py: error: {error}")
    print(f"serving {options.model} on port {server.server_port}", flush=True)
    server.serve_forever()


def start(model: Path, host: str, port: int) -> ThreadingHTTPServer:
    """A server that is bound and has its model loaded; port 0 means any free one."""
    about = json.loads((model / "model.json").read_text())
    program = torch.export.load(model / "model.pt2").module()
    answer = {"digits": Digits, "text": Text}[about["task"]](program, about["input"])
    return ThreadingHTTPServer((host, port), type("Bound", (Handler,), {"answer": answer}))


class Digits:
    """Classes of images, given as lists of pixels from 0 to 16."""

    def __init__(self, program: torch.nn.Module, shape: list[int]) -> None:
        self._program, self._shape = program, shape

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            images = torch.tensor(asked["instances"], dtype=torch.float32)
            images = images.reshape(len(images), *self._shape)
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise BadRequest(
                f'send {{"instances": [IMAGE, ...]}}, each image a list of shape {self._shape}, '
                "pixels from 0 to 16"
            ) from None
        with torch.no_grad():
            chances = self._program(normal(images)).softmax(dim=1)
        return {
            "predictions": [
                {"class": int(row.argmax()), "probabilities": row.tolist()} for row in chances
            ]
        }


class Text:
    """A prompt, continued with the likeliest byte each time: the same answer to the same prompt."""

    longest = 1000

    def __init__(self, program: torch.nn.Module, shape: list[int]) -> None:
        self._program, self._sequence = program, shape[0]

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt, length = asked.get("prompt"), asked.get("length", 100)
        if not isinstance(prompt, str) or not isinstance(length, int):
            raise BadRequest('send {"prompt": "some text", "length": 100}')
        written = list(prompt.encode())
        with torch.no_grad():
            for _ in range(min(max(length, 0), self.longest)):
                seen = ([ord(" ")] * self._sequence + written)[-self._sequence :]
                written.append(int(self._program(torch.tensor([seen]))[0, -1].argmax()))
        return {"text": bytes(written).decode(errors="replace")}


class Handler(BaseHTTPRequestHandler):
    answer: Answer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        known = self.path == "/ping"
        self._send(HTTPStatus.OK if known else HTTPStatus.NOT_FOUND, {})

    def do_POST(self) -> None:
        try:
            self._send(*self._invoke())
        except BadRequest as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})

    def _invoke(self) -> tuple[HTTPStatus, dict[str, Any]]:
        size = int(self.headers.get("Content-Length") or 0)
        if size > LARGEST:
            self.close_connection = True
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"at most {LARGEST} bytes"}
        body = self.rfile.read(size)
        if self.path != "/invocations":
            return HTTPStatus.NOT_FOUND, {"error": "POST goes to /invocations"}
        if self.headers.get_content_type() != "application/json":
            return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, {"error": "send application/json"}
        try:
            asked = json.loads(body)
        except ValueError as error:
            raise BadRequest(f"this is not JSON: {error}") from None
        if not isinstance(asked, dict):
            raise BadRequest("send a JSON object")
        return HTTPStatus.OK, type(self).answer(asked)

    def _send(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Only what went wrong: a health check comes every few seconds."""
        if int(code) >= HTTPStatus.BAD_REQUEST:
            super().log_request(code, size)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve an exported model over HTTP.")
    parser.add_argument("model", type=Path, nargs="?", default=Path("/opt/ml/model"))
    parser.add_argument("--host", default="0.0.0.0", help="address to listen at")  # noqa: S104 - a container
    port = int(os.environ.get("SAGEMAKER_BIND_TO_PORT", "8080"))
    parser.add_argument("--port", type=int, default=port)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
