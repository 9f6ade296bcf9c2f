"""Serve an exported model over HTTP, with the interface of SageMaker hosting.

    python serve.py model --port 8080
    curl localhost:8080/invocations -H 'Content-Type: application/json' -d '{"instances": [...]}'

The server listens on 127.0.0.1 only. In a container, make it listen on all addresses:

    ENTRYPOINT ["python", "serve.py", "--host", "0.0.0.0"]

`GET /ping` returns 200 once the model is loaded. `POST /invocations` takes `{"instances": [...]}`,
a list of images in the shape that `model.json` gives, with pixels from 0 to 16, and returns the
class and the probabilities of each. For a text model it takes `{"prompt": "...", "length": 100}`
and returns the prompt with its continuation.
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint import safetensors_io
from trainer.checkpoint.restore import build_on_meta, materialize
from trainer.checkpoint.safe_pickle import InvalidFile
from trainer.checkpoint.tensor_reader import open_regular_file
from trainer.http_messages import HTTPError
from trainer.http_server import Server, read_json
from trainer.tasks import normalize

MAX_DESCRIPTION = 2**16
"""Maximum size of a `model.json`, in bytes."""

Predict = Callable[[dict[str, Any]], dict[str, Any]]
"""Content of a request to content of its response."""


def main() -> None:
    """Run the command line; exits with code 1 if the model or the address is not usable."""
    options = parse(sys.argv[1:])
    try:
        server = create_server(options.model, options.host, options.port)
    except (OSError, ValueError) as error:
        sys.exit(f"serve.py: error: {error}")
    line = f"serving {options.model} on {options.host}, port {server.server_port}"
    server.serve_forever(started=partial(print, line, flush=True))


def create_server(folder: Path, host: str, port: int) -> Server:
    """Load the model in `folder` and bind a server; port 0 means any free one.

    Raises OSError, and ValueError if the folder has no model that export.py wrote.
    """
    predict = load(folder)
    routes = {
        "/ping": ("GET", lambda _request: {}),
        "/invocations": ("POST", lambda request: predict(read_json(request))),
    }
    return Server(host, port, routes)


def load(folder: Path) -> Predict:
    """Load the model that export.py wrote to `folder`.

    Reads the weights and the description, which are plain data, so nothing in the folder can run.
    Raises OSError and InvalidFile.
    """
    weights = safetensors_io.read(folder / safetensors_io.SINGLE)
    try:
        with open_regular_file(folder / "model.json") as file:
            description = json.loads(file.read(MAX_DESCRIPTION))
        task, settings = description["task"], dict(description["model"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise InvalidFile(
            f"{folder / 'model.json'} does not describe a model: export it again"
        ) from None
    model = build_on_meta({**settings, "task": task}, max_layers=len(weights))
    if _layout(weights) != _layout(model.state_dict()):
        raise InvalidFile(f"the weights in {folder} do not match its model.json")
    materialize(model, weights)
    return (
        DigitsPredictor(model) if task == "digits" else TextPredictor(model, settings["sequence"])
    )


def _layout(weights: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}


class DigitsPredictor:
    """Classifies images, given as nested lists of pixels from 0 to 16."""

    max_images = 4096
    """Per request."""
    shape = (1, 8, 8)
    """Of an image."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, content: dict[str, Any]) -> dict[str, Any]:
        """The class and the ten probabilities of each image. Raises HTTPError."""
        with torch.no_grad():
            probabilities = self._model(normalize(self._images(content))).softmax(dim=1)
        return {
            "predictions": [
                {"class": int(row.argmax()), "probabilities": row.tolist()} for row in probabilities
            ]
        }

    def _images(self, content: dict[str, Any]) -> torch.Tensor:
        """The images of a request (images, 1, 8, 8)."""
        try:
            images = torch.tensor(content["instances"], dtype=torch.float32)
            images = images.reshape(len(images), *self.shape)
            in_range = bool(((images >= 0) & (images <= 16)).all())  # noqa: PLR2004
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError):
            in_range = False  # not numbers, too large, or of another shape
        if in_range and 0 < len(images) <= self.max_images:
            return images
        raise HTTPError(
            HTTPStatus.BAD_REQUEST,
            f'send {{"instances": [IMAGE, ...]}} with 1 to {self.max_images} images, each a list '
            f"of shape {list(self.shape)} with pixels from 0 to 16",
        )


class TextPredictor:
    """Continues a prompt with the most likely byte each time, so responses are reproducible."""

    max_prompt, max_length = 2**16, 1000
    """In characters and in bytes."""

    def __init__(self, model: nn.Module, sequence: int) -> None:
        self._model, self._sequence = model, sequence

    def __call__(self, content: dict[str, Any]) -> dict[str, Any]:
        """The prompt and its continuation. Raises HTTPError."""
        text, length = self._prompt(content), content.get("length", 100)
        with torch.no_grad():
            for _ in range(min(max(length, 0), self.max_length)):
                window = bytes(text[-self._sequence :]).rjust(self._sequence, b" ")
                text.append(int(self._model(torch.tensor([list(window)]))[0, -1].argmax()))
        return {"text": text.decode(errors="replace")}

    def _prompt(self, content: dict[str, Any]) -> bytearray:
        prompt, length = content.get("prompt"), content.get("length", 100)
        if type(prompt) is str and type(length) is int and len(prompt) <= self.max_prompt:
            try:
                return bytearray(prompt.encode())
            except UnicodeEncodeError:
                pass  # a lone surrogate
        raise HTTPError(
            HTTPStatus.BAD_REQUEST,
            'send {"prompt": "some text", "length": 100} with a prompt of at most '
            f"{self.max_prompt} characters",
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line: `model`, `host` and `port`."""
    parser = argparse.ArgumentParser(description="Serve an exported model over HTTP.")
    parser.add_argument("model", type=Path, nargs="?", default=Path("/opt/ml/model"))
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 for all, as in a container. Default: %(default)s",
    )
    port = os.environ.get("SAGEMAKER_BIND_TO_PORT", "8080")
    parser.add_argument("--port", type=int, default=port, help="default: %(default)s")
    if arguments[-1:] == ["serve"]:  # SageMaker starts every container with this argument
        arguments = arguments[:-1]
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
